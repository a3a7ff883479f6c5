# SPDX-License-Identifier: Apache-2.0
"""The kernels under the names and signatures of the notes, over torch tensors.

Each function checks shapes, dtypes, devices and contiguity, describes the engine's side as strides and calls
the native module: the CUDA kernel when the pages are on a GPU (queued on the current stream; the other side
may be on the same GPU or in page-locked host memory), else its host twin. Both give the same bytes.

`store` is the direction: True copies pages to the packed tensor, False the other way round. A slot of -1 is
skipped. L layers, T tokens, B blocks, N tokens of a block, H heads, D elements of a head, E = H x D.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvcache import _native
from kvcache._native import PagedLayout, Pages

__all__ = [
    "KV_DTYPES",
    "PagedLayout",
    "Pages",
    "check_dtype",
    "kv_transfer",
    "multi_layer_kv_transfer",
    "multi_layer_kv_transfer_unilateral",
    "rotary_embedding_k_fused",
    "single_layer_kv_transfer",
    "single_layer_kv_transfer_sgl",
    "zero_tokens",
]


KV_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.uint8,
    torch.int8,
)
"""Of KV: numbers that engines keep one by one. uint8 is what vLLM calls fp8 that it casts itself."""


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raises ValueError unless KV may be of this type."""
    if dtype not in KV_DTYPES:
        accepted = ", ".join(str(known).removeprefix("torch.") for known in KV_DTYPES)
        raise ValueError(f"{name} is of {dtype}; {accepted} are accepted")


def kv_transfer(
    memory: torch.Tensor, pages: Pages, slot_mapping: torch.Tensor, store: bool, *, token_major: bool = True
) -> None:
    """The direct form: pages of any strided layout to and from one packed tensor that holds the whole slot
    mapping.

    Args:
        memory: contiguous `[L, T, planes, E]` (`token_major`) or `[planes, L, T, E]`, any number of
            dimensions.
        pages: of L layers.
        slot_mapping: int64 [T]. On a GPU it is fetched, which waits for the stream.
        store: pages to memory, else memory to pages.
        token_major: see `memory`.

    Raises:
        ValueError: pages of coded rows, memory that is not contiguous or has not the bytes of L x T tokens, a
            device on which the pages cannot reach it, or a slot outside of the pages. Nothing was written.
    """
    if pages.coded:
        raise ValueError(
            "chunks of these pages hold coded rows; pages whose chunks hold plain rows are accepted"
        )
    slots = _slots(slot_mapping)
    _check_contiguous("the packed tensor", memory)
    expected = pages.num_layers * len(slots) * pages.layout.token_bytes
    if memory.nbytes != expected:
        raise ValueError(
            f"the packed tensor {_seen(memory)} has {memory.nbytes} bytes; {pages.num_layers} layers of "
            f"{len(slots)} "
            f"tokens of {pages.layout.token_bytes} bytes take {expected}"
        )
    _check_reach(memory, pages.device)
    _native.multi_layer_kv_transfer(
        pages, memory.data_ptr(), slots, store, token_major=token_major, stream=_stream(pages.device)
    )


def single_layer_kv_transfer(
    dst: torch.Tensor,
    kvcache_layer: torch.Tensor,
    slot_mapping: torch.Tensor,
    store: bool,
    token_major: bool,
    vllm_two_major: bool,
    use_mla: bool,
) -> None:
    """One layer.

    Args:
        dst: the packed tensor, written when `store` and read otherwise: `[T, 2, E]` (`token_major`), `[2, T,
            E]`, or `[T, E]` for MLA.
        kvcache_layer: `[2, B, N, H, D]` (`vllm_two_major`), `[B, 2, N, H, D]`, or `[B, N, E]` for MLA; any
            strides with contiguous heads.
        slot_mapping: int64 [T].
        store: pages to `dst`, else `dst` to pages.
        token_major: see `dst`; without meaning for MLA.
        vllm_two_major: see `kvcache_layer`; without meaning for MLA.
        use_mla: one latent in the place of key and value.

    Raises:
        ValueError: a shape, dtype, device or stride that is not accepted, or a slot outside of the pages.
    """
    layout = _layer_layout(kvcache_layer, vllm_two_major, use_mla)
    _check_packed(dst, kvcache_layer, slot_mapping, layout, token_major, layers=None)
    bases = np.array([kvcache_layer.data_ptr()], dtype=np.uint64)
    kv_transfer(
        dst, Pages(bases, layout, _index(kvcache_layer.device)), slot_mapping, store, token_major=token_major
    )


def multi_layer_kv_transfer(
    key_value: torch.Tensor,
    key_value_ptrs: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_device: torch.device,
    page_buffer_size: int,
    store: bool,
    use_mla: bool,
    *,
    token_major: bool = False,
) -> None:
    """All layers, each a page buffer of `page_buffer_size` = B x N slots.

    Args:
        key_value: the packed tensor: `[2, L, T, E]`, with `token_major` `[L, T, 2, E]`, for MLA `[L, T, E]`
            or `[1, L, T, E]`.
        key_value_ptrs: int64 [L], the address of each layer's `[2, page_buffer_size, E]`, or
            `[page_buffer_size, E]` for MLA.
        slot_mapping: int64 [T].
        paged_device: where the pages are.
        page_buffer_size: slots of a layer.
        store: pages to `key_value`, else `key_value` to pages.
        use_mla: one latent in the place of key and value.
        token_major: see `key_value`.

    Raises:
        ValueError: as `single_layer_kv_transfer`.
    """
    planes = 1 if use_mla else 2
    row = key_value.shape[-1] * key_value.element_size() if key_value.dim() else 0
    bases = _addresses("key_value_ptrs", key_value_ptrs)
    check_dtype("key_value", key_value.dtype)
    layout = _flat_layout(row, page_buffer_size, planes, kv_stride=page_buffer_size * row)
    _check_packed(key_value, None, slot_mapping, layout, token_major, layers=len(bases))
    pages = Pages(bases, layout, _index(torch.device(paged_device)))
    kv_transfer(key_value, pages, slot_mapping, store, token_major=token_major or use_mla)


def multi_layer_kv_transfer_unilateral(
    key_value: torch.Tensor,
    key_ptrs: torch.Tensor,
    value_ptrs: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_device: torch.device,
    page_buffer_size: int,
    store: bool,
    *,
    token_major: bool = False,
) -> None:
    """All layers, keys and values in separate page buffers `[page_buffer_size, E]`.

    Args:
        key_value: the packed tensor: `[2, L, T, E]`, or with `token_major` `[L, T, 2, E]`.
        key_ptrs: int64 [L], the address of each layer's keys.
        value_ptrs: int64 [L], the address of each layer's values.

    The other arguments and errors are those of `multi_layer_kv_transfer`.
    """
    keys, values = _addresses("key_ptrs", key_ptrs), _addresses("value_ptrs", value_ptrs)
    row = key_value.shape[-1] * key_value.element_size() if key_value.dim() else 0
    check_dtype("key_value", key_value.dtype)
    layout = _flat_layout(row, page_buffer_size, 2, kv_stride=page_buffer_size * row)
    _check_packed(key_value, None, slot_mapping, layout, token_major, layers=len(keys))
    pages = Pages.unilateral(keys, values, layout, _index(torch.device(paged_device)))
    kv_transfer(key_value, pages, slot_mapping, store, token_major=token_major)


def single_layer_kv_transfer_sgl(
    dst: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    store: bool,
    token_major: bool,
) -> None:
    """One layer of SGLang's pools, `[slots, H, D]` each, any strides with contiguous heads.

    Args:
        dst: the packed tensor: `[T, 2, E]` (`token_major`) or `[2, T, E]`.
        key_pool: keys of the layer.
        value_pool: its values, like the keys.

    The other arguments and errors are those of `single_layer_kv_transfer`.
    """
    if key_pool.dim() != 3 or key_pool.stride(-1) != 1:
        raise ValueError(f"key_pool is {_seen(key_pool)}; [slots, H, D] with contiguous heads is accepted")
    if (value_pool.shape, value_pool.stride(), value_pool.dtype, value_pool.device) != (
        key_pool.shape,
        key_pool.stride(),
        key_pool.dtype,
        key_pool.device,
    ):
        raise ValueError(f"value_pool is {_seen(value_pool)}, key_pool {_seen(key_pool)}; they must be alike")
    check_dtype("key_pool", key_pool.dtype)
    size = key_pool.element_size()
    layout = PagedLayout(
        kv_stride=key_pool.shape[0] * key_pool.stride(0) * size,  # not used: each pool has its own base
        block_stride=key_pool.stride(0) * size,
        token_stride=key_pool.stride(0) * size,
        head_stride=key_pool.stride(1) * size,
        heads=key_pool.shape[1],
        head_bytes=key_pool.shape[2] * size,
        block_size=1,
        num_blocks=key_pool.shape[0],
        planes=2,
    )
    _check_packed(dst, key_pool, slot_mapping, layout, token_major, layers=None)
    keys, values = (np.array([pool.data_ptr()], dtype=np.uint64) for pool in (key_pool, value_pool))
    pages = Pages.unilateral(keys, values, layout, _index(key_pool.device))
    kv_transfer(dst, pages, slot_mapping, store, token_major=token_major)


def rotary_embedding_k_fused(
    old_positions: torch.Tensor,
    new_positions: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Moves rotated keys from their old to their new positions, in place: one rotation in float32, one
    rounding.

    Args:
        old_positions: int64 [T], what the keys were rotated for.
        new_positions: int64 [T].
        key: `[T, H, head_size]` of float32, float16, bfloat16, float8_e4m3fn or float8_e5m2; any strides with
            contiguous heads.
        head_size: elements of a head.
        cos_sin_cache: contiguous `[positions, R]`, cosines then sines (whatever scaling is in them); the
            first R elements of a head are rotated.
        is_neox: pairs `(i, i + R/2)`, else `(2i, 2i + 1)`.

    Raises:
        ValueError: a shape, dtype, device or position that is not accepted; nothing was written.
    """
    if key.dim() != 3 or key.shape[2] != head_size or key.stride(-1) != 1:
        raise ValueError(f"key is {_seen(key)}; [T, H, {head_size}] with contiguous heads is accepted")
    if cos_sin_cache.dim() != 2 or cos_sin_cache.device != key.device:
        raise ValueError(
            f"cos_sin_cache is {_seen(cos_sin_cache)} on {cos_sin_cache.device}; [positions, R] on "
            f"{key.device} is "
            "accepted"
        )
    _check_contiguous("cos_sin_cache", cos_sin_cache)
    was, now = _slots(old_positions, "old_positions"), _slots(new_positions, "new_positions")
    if len(was) != key.shape[0]:
        raise ValueError(f"old_positions has {len(was)} entries for keys of {key.shape[0]} tokens")
    device = _index(key.device)
    _native.rotate_keys(
        keys=key.data_ptr(),
        heads=key.shape[1],
        head_size=head_size,
        token_stride=key.stride(0) * key.element_size(),
        head_stride=key.stride(1) * key.element_size(),
        dtype=_dtype_name(key),
        old_positions=was,
        new_positions=now,
        table=cos_sin_cache.data_ptr(),
        positions=cos_sin_cache.shape[0],
        rotary_size=cos_sin_cache.shape[1],
        table_dtype=_dtype_name(cos_sin_cache),
        neox=is_neox,
        device=device,
        stream=_stream(device),
    )


def zero_tokens(packed: torch.Tensor, gaps: Sequence[tuple[int, int]]) -> None:
    """Fills the tokens `[start, end)` of each gap with zeros in a contiguous `[T, ...]` tensor.

    Raises:
        ValueError: a tensor that is not contiguous, or a gap outside of it; nothing was written.
    """
    _check_contiguous("the packed tensor", packed)
    if packed.dim() == 0:
        raise ValueError(f"the packed tensor is {_seen(packed)}; [T, ...] is accepted")
    for start, end in gaps:
        if not 0 <= start <= end <= packed.shape[0]:
            raise ValueError(f"a gap from {start} to {end} in {packed.shape[0]} tokens")
    row = packed.stride(0) * packed.element_size()
    addresses = np.array([packed.data_ptr() + start * row for start, _ in gaps], dtype=np.uint64)
    sizes = np.array([(end - start) * row for start, end in gaps], dtype=np.int64)
    device = _index(packed.device)
    _native.zero_spans(addresses, sizes, device, _stream(device))


def _layer_layout(layer: torch.Tensor, two_major: bool, use_mla: bool) -> PagedLayout:
    dims = 3 if use_mla else 5
    accepted = "[B, N, E]" if use_mla else "[2, B, N, H, D]" if two_major else "[B, 2, N, H, D]"
    two = None if use_mla else 0 if two_major else 1
    if layer.dim() != dims or (two is not None and layer.shape[two] != 2) or layer.stride(-1) != 1:
        raise ValueError(f"kvcache_layer is {_seen(layer)}; {accepted} with contiguous heads is accepted")
    check_dtype("kvcache_layer", layer.dtype)
    size = layer.element_size()
    block = 1 if two == 0 else 0
    head_bytes = layer.shape[-1] * size
    return PagedLayout(
        kv_stride=0 if two is None else layer.stride(two) * size,
        block_stride=layer.stride(block) * size,
        token_stride=layer.stride(1 if use_mla else 2) * size,
        head_stride=head_bytes if use_mla else layer.stride(3) * size,
        heads=1 if use_mla else layer.shape[3],
        head_bytes=head_bytes,
        block_size=layer.shape[1 if use_mla else 2],
        num_blocks=layer.shape[block],
        planes=1 if use_mla else 2,
    )


def _flat_layout(row_bytes: int, slots: int, planes: int, kv_stride: int) -> PagedLayout:
    """Slots one after another: a pool without blocks."""
    if row_bytes < 1 or slots < 1:
        raise ValueError(f"a page buffer of {slots} slots of {row_bytes} bytes; both must be above 0")
    return PagedLayout(
        kv_stride=kv_stride,
        block_stride=slots * row_bytes,
        token_stride=row_bytes,
        head_stride=row_bytes,
        heads=1,
        head_bytes=row_bytes,
        block_size=slots,
        num_blocks=1,
        planes=planes,
    )


def _check_packed(
    packed: torch.Tensor,
    like: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    layout: PagedLayout,
    token_major: bool,
    layers: int | None,
) -> None:
    """Raises ValueError unless the packed tensor has the shape that the layout and the mapping ask for."""
    _check_index("slot_mapping", slot_mapping)
    tokens = slot_mapping.numel()
    hidden = layout.row_bytes // packed.element_size()
    middle = [tokens] if layers is None else [layers, tokens]
    if layout.planes == 1:
        accepted = [[*middle, hidden]] if layers is None else [[*middle, hidden], [1, *middle, hidden]]
    else:
        accepted = [[*middle, 2, hidden] if token_major else [2, *middle, hidden]]
    if list(packed.shape) not in accepted:
        raise ValueError(
            f"the packed tensor is {_seen(packed)}; {' or '.join(map(str, accepted))} is accepted for "
            f"{tokens} slots of {layout.row_bytes} bytes"
        )
    if like is not None and packed.dtype != like.dtype:
        raise ValueError(
            f"the packed tensor is of {packed.dtype}, the pages are of {like.dtype}; they must be equal"
        )


def _check_index(name: str, index: torch.Tensor) -> None:
    if not isinstance(index, torch.Tensor) or index.dtype != torch.int64 or index.dim() != 1:
        raise ValueError(f"{name} is {_seen(index)}; a tensor of int64 with one dimension is accepted")


def _slots(slot_mapping: torch.Tensor, name: str = "slot_mapping") -> np.ndarray:
    _check_index(name, slot_mapping)
    slots: np.ndarray = slot_mapping.cpu().contiguous().numpy()
    return slots


def _addresses(name: str, pointers: torch.Tensor) -> np.ndarray:
    if pointers.dtype not in (torch.int64, torch.uint64) or pointers.dim() != 1 or not len(pointers):
        raise ValueError(f"{name} is {_seen(pointers)}; int64 addresses, one a layer, are accepted")
    addresses: np.ndarray = pointers.cpu().contiguous().numpy().view(np.uint64)
    return addresses


def _check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is {_seen(tensor)}; a contiguous one is accepted")


def _check_reach(memory: torch.Tensor, device: int) -> None:
    """Raises ValueError unless the processor that copies can reach `memory`."""
    if device < 0 and memory.device.type != "cpu":
        raise ValueError(
            f"the pages are in host memory, the packed tensor on {memory.device}; host memory is accepted"
        )
    if device < 0 or (memory.is_cuda and memory.device.index == device):
        return
    locked = memory.device.type == "cpu" and (
        _native.is_pinned(memory.data_ptr(), memory.nbytes) or memory.is_pinned()
    )
    if not locked:
        raise ValueError(
            f"the pages are on cuda:{device}, the packed tensor on {memory.device}; the same GPU or "
            "page-locked host "
            "memory is accepted"
        )


def _index(device: torch.device) -> int:
    if device.type == "cpu":
        return -1
    if device.type != "cuda":
        raise ValueError(f"pages on {device}; cpu and cuda are accepted")
    return device.index if device.index is not None else torch.cuda.current_device()


def _stream(device: int) -> int:
    """The current stream of a device as an integer."""
    return 0 if device < 0 else int(torch.cuda.current_stream(device).cuda_stream)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _seen(tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__}"
    return f"a tensor {list(tensor.shape)}, stride {list(tensor.stride())}, {tensor.dtype}"
