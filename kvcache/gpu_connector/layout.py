# SPDX-License-Identifier: Apache-2.0
"""How an engine's KV tensors lie in memory, read off its declared specification and the tensors' strides.

A layout is strides, not a name (`PagedLayout`). Axes are called B blocks, N tokens of a block, H KV heads, D
elements of a head, 2 key and value, C the content of one head and token: key then value (2D elements), or the
latent of MLA. vLLM's per-layer tensors have been `2BNHD`, `B2NHD`, `2BHND` and, since 0.23 on the CPU and
0.26 elsewhere, `BHNC` in any memory order; MLA is `BNC` or `BHNC` with one head. What fits none of them, or
two that differ, is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvcache._native import (
    PagedLayout,
    Pages,
    StagingRing,
    batched_kv_transfer,
    code_escapes,
    coded_row_bytes,
    expand_in_place,
)
from kvcache.lmc_ops import check_dtype

__all__ = [
    "LayerSpec",
    "PagedLayout",
    "UnknownLayout",
    "describe_layer",
    "describe_layers",
    "device_index",
    "joined_where_pages_are",
    "token_view",
    "verify_code",
    "verify_layout",
]

_KV_AXES = ("2BNHD", "B2NHD", "2BHND", "B2HND", "BHNC", "BNHC")
_MLA_AXES = ("BNC", "BHNC")


class UnknownLayout(ValueError):  # noqa: N818 -- the name of the design
    """The KV tensors cannot be copied safely. The text says what was seen and what is accepted."""


@dataclass(frozen=True)
class LayerSpec:
    """What the engine declares about the KV of its layers.

    Args:
        block_size: tokens of a block as the scheduler counts them; the tensor's blocks may be a part of it.
        num_kv_heads: on this rank.
        head_size: elements of a head; of the latent for MLA.
        dtype: of an element; fp8 may come as its dtype or as uint8.
        num_blocks: as the scheduler counts them.
        use_mla: one latent in the place of keys and values.
        axes: the tensor's axes if the engine says them, such as `2BNHD`; None to find the only ones that fit.
        coded: chunks hold bfloat16 in fewer bytes, without loss (`can_be_coded`).
        joined: chunks keep a head's key and value side by side, as the pages have them: one row of both a
            token (`joined_where_pages_are`).

    Raises:
        ValueError: joined rows that are coded, or of MLA, which has one row anyway.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    num_blocks: int
    use_mla: bool = False
    axes: str | None = None
    coded: bool = False
    joined: bool = False

    def __post_init__(self) -> None:
        if self.joined and (self.coded or self.use_mla):
            raise ValueError("joined rows that are coded, or of MLA; joined, coded or neither is accepted")

    @property
    def planes(self) -> int:
        """Rows of a token in a chunk: its key and its value, or one of both."""
        return 1 if self.use_mla or self.joined else 2

    @property
    def hidden(self) -> int:
        """Elements of a row: of one token's key, of its latent, or of key and value."""
        return self.num_kv_heads * self.head_size * (2 if self.joined else 1)

    @property
    def content(self) -> int:
        """Elements of one head and token in the pages: key and value, or the latent."""
        return self.head_size * (1 if self.use_mla else 2)

    @property
    def can_be_coded(self) -> bool:
        """Whether the rows have a code, and one that is shorter than they are."""
        if self.dtype != torch.bfloat16 or self.hidden % 32 or self.head_size % 8 or self.hidden > 65536:
            return False
        return coded_row_bytes(self.hidden) < 2 * self.hidden

    @property
    def chunk_token_bytes(self) -> int:
        """Of a token's KV of one layer in a chunk."""
        row = coded_row_bytes(self.hidden) if self.coded else self.hidden * self.dtype.itemsize
        return self.planes * row

    def register(self, kvcaches: Sequence[torch.Tensor]) -> Pages:
        """The pages of these layers, described and verified. Raises UnknownLayout."""
        pages = describe_layers(kvcaches, self)
        for tensor in kvcaches:
            verify_layout(tensor, self)
            if self.coded:
                verify_code(tensor, self)
        return pages


def joined_where_pages_are(spec: LayerSpec, tensor: torch.Tensor) -> LayerSpec:
    """`spec` with joined rows where tokens of a block follow each other in the pages, each with the keys and
    values of all its heads: of chunks with such rows a block of a layer is one run on both sides, which a
    copy engine moves as it is. Of one head all rows are so.

    Raises:
        UnknownLayout: as `describe_layer`.
    """
    if spec.coded or spec.use_mla or spec.num_kv_heads == 1:
        return spec
    axes, layout = _match(tensor, spec)
    head = 2 * layout.head_bytes
    runs = (layout.head_stride, layout.token_stride) == (head, layout.heads * head)
    return replace(spec, joined=True) if runs and "C" in axes else spec


def describe_layer(tensor: torch.Tensor, spec: LayerSpec) -> PagedLayout:
    """The strides of one layer's pages.

    Raises:
        UnknownLayout: no axes fit the tensor, several that differ do, or elements overlap.
    """
    return _match(tensor, spec)[1]


def describe_layers(tensors: Sequence[torch.Tensor], spec: LayerSpec) -> Pages:
    """The pages of all layers, in the order given.

    Raises:
        UnknownLayout: as `describe_layer`; layers that differ, share bytes, or leave bytes between their
            blocks that are no layer's (padded pages).
    """
    if not tensors:
        raise UnknownLayout("no KV tensors were given; one a layer is accepted")
    layouts = [describe_layer(tensor, spec) for tensor in tensors]
    for index, layout in enumerate(layouts):
        if layout != layouts[0]:
            raise UnknownLayout(
                f"layer {index} lies as {layout}, layer 0 as {layouts[0]}; layers of one layout are accepted"
            )
        if tensors[index].device != tensors[0].device:
            raise UnknownLayout(
                f"layer {index} is on {tensors[index].device}, layer 0 on {tensors[0].device}"
            )
    bases = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)
    _check_layers_apart([int(base) for base in bases], _gap(tensors[0]), layouts[0])
    return Pages(bases, layouts[0], device_index(tensors[0].device), spec.coded)


def token_view(tensor: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """A layer's bytes as uint8 [B, N, planes, H, head bytes], by torch's indexing alone. Raises
    UnknownLayout.
    """
    return _token_view(tensor, *_match(tensor, spec))


def verify_layout(tensor: torch.Tensor, spec: LayerSpec, blocks: Sequence[int] | None = None) -> None:
    """Writes random bytes through torch's indexing and reads them through the native path, and the other way
    round.

    The blocks used (the first and the last if None) hold what they held, bit for bit, when this returns.

    Raises:
        UnknownLayout: the two ways differ.
    """
    axes, layout = _match(tensor, spec)
    view = _token_view(tensor, axes, layout)  # uint8 [B, N, planes, H, head bytes]
    chosen = sorted(set(blocks if blocks is not None else (0, layout.num_blocks - 1)))
    pages = Pages(np.array([tensor.data_ptr()], dtype=np.uint64), layout, device_index(tensor.device))
    saved = view[chosen].clone()
    slots = np.concatenate([np.arange(b * layout.block_size, (b + 1) * layout.block_size) for b in chosen])
    try:
        for store in (True, False):
            pattern = torch.randint(0, 256, saved.shape, dtype=torch.uint8).to(tensor.device)
            packed = torch.empty_like(pattern) if store else pattern.clone()
            if store:
                view[chosen] = pattern
            _copy(pages, packed, slots.astype(np.int64), store)
            if not torch.equal(packed if store else view[chosen], pattern):
                raise UnknownLayout(
                    f"a {'read' if store else 'write'} through {layout} of a tensor {axes} gave other "
                    "bytes than "
                    "torch's own indexing; caching stays off"
                )
    finally:
        view[chosen] = saved
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)


def verify_code(tensor: torch.Tensor, spec: LayerSpec, blocks: Sequence[int] | None = None) -> None:
    """Codes numbers that are written through torch's indexing: on a GPU too the bytes must be those of the
    host twin and their numbers come back, and a row without a code must be refused.

    The blocks used (the first and the last if None) hold what they held, bit for bit, when this returns.

    Raises:
        UnknownLayout: it is otherwise.
    """
    axes, layout = _match(tensor, spec)
    view = _token_view(tensor, axes, layout)
    chosen = sorted(set(blocks if blocks is not None else (0, layout.num_blocks - 1)))
    saved = view[chosen].clone()
    pages = Pages(np.array([tensor.data_ptr()], dtype=np.uint64), layout, device_index(tensor.device), True)
    slots = np.concatenate([np.arange(b * layout.block_size, (b + 1) * layout.block_size) for b in chosen])
    slots = slots.astype(np.int64)
    numbers = torch.randn((len(slots), spec.planes, spec.hidden)).clamp_(min=-4, max=4).to(torch.bfloat16)
    room = code_escapes(spec.hidden)
    full = numbers[::3]  # of these as many escape as may
    full[full.abs() < 0.1] = 1.0
    for at, escaping in enumerate((1e-30, torch.inf, 0.0)):
        full[:, :, at - room :: 3] = escaping
    numbers[1::3, :, 2] = 2.0**13  # its exponent is no base of the row
    pattern = numbers.view(torch.uint8).reshape(saved.shape)
    expected = _coded(numbers)
    chunk = torch.full(expected.shape, 0xA5, dtype=torch.uint8, pin_memory=tensor.is_cuda)
    refused = torch.zeros(1, dtype=torch.int32, pin_memory=tensor.is_cuda)
    try:
        view[chosen] = pattern.to(tensor.device)
        _copy(pages, chunk, slots, True, refused)
        good = not int(refused[0]) and torch.equal(chunk, expected)
        for load in (_load_in_place, _copy) if pages.expands_in_place else (_copy,):
            view[chosen] = torch.full_like(saved, 0x5A)
            load(pages, chunk, slots, False)
            good = good and torch.equal(view[chosen].cpu(), pattern)
        numbers[-1, -1, -room - 1 :] = 1e-30
        view[chosen] = pattern.to(tensor.device)
        _copy(pages, chunk, slots, True, refused)
        if not good or int(refused[0]) != 1:
            raise UnknownLayout(
                f"rows coded from a tensor {axes} through {layout} are not those of the host; caching stays "
                "off, leave out `compression`"
            )
    finally:
        view[chosen] = saved
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)


def _coded(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 [tokens, planes, bytes of a coded row] of bfloat16 [tokens, planes, elements], by the host."""
    tokens, planes, elements = numbers.shape
    row = 2 * elements
    layout = PagedLayout(
        kv_stride=row if planes == 2 else 0,
        block_stride=planes * row,
        token_stride=planes * row,
        head_stride=row,
        heads=1,
        head_bytes=row,
        block_size=1,
        num_blocks=tokens,
        planes=planes,
    )
    pages = Pages(np.array([numbers.data_ptr()], dtype=np.uint64), layout, -1, True)
    chunk = torch.empty((tokens, planes, pages.chunk_row_bytes), dtype=torch.uint8)
    _copy(pages, chunk, np.arange(tokens, dtype=np.int64), True, torch.zeros(1, dtype=torch.int32))
    return chunk


def _copy(
    pages: Pages, packed: torch.Tensor, slots: np.ndarray, store: bool, refused: torch.Tensor | None = None
) -> None:
    """One chunk, which on a GPU may lie there or in page-locked memory; complete on return in that memory."""
    stream = None if pages.device < 0 else torch.cuda.current_stream(pages.device)
    address = np.array([packed.data_ptr()], dtype=np.uint64)
    start, end = np.array([0], dtype=np.int64), np.array([len(slots)], dtype=np.int64)
    batched_kv_transfer(
        pages,
        address,
        start,
        end,
        slots,
        store,
        stream=0 if stream is None else stream.cuda_stream,
        refused=0 if refused is None else refused.data_ptr(),
    )
    if stream is not None and not packed.is_cuda:
        stream.synchronize()


def _load_in_place(pages: Pages, packed: torch.Tensor, slots: np.ndarray, store: bool) -> None:
    """As `_copy` a load, of one chunk of coded rows that the copy engine brings."""
    stream = None
    if pages.device >= 0:
        stream = torch.cuda.Stream(pages.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(pages.device))
    handle = 0 if stream is None else stream.cuda_stream
    address = np.array([packed.data_ptr()], dtype=np.uint64)
    chunk = (address, np.array([0], dtype=np.int64), np.array([len(slots)], dtype=np.int64), slots)
    StagingRing(pages.device, packed.nbytes, 1).strided_dma(pages, *chunk, store, stream=handle)
    expand_in_place(pages, *chunk, stream=handle)
    if stream is not None:
        stream.synchronize()


def _match(tensor: torch.Tensor, spec: LayerSpec) -> tuple[str, PagedLayout]:
    check_declared_dtype(tensor, spec.dtype)
    _gap(tensor)
    known = _MLA_AXES if spec.use_mla else _KV_AXES
    if spec.axes is not None and spec.axes not in known:
        raise UnknownLayout(f"axes {spec.axes!r} are declared; accepted are {', '.join(known)}")
    tried = known if spec.axes is None else (spec.axes,)
    found = {axes: layout for axes in tried if (layout := _layout(tensor, axes, spec)) is not None}
    if not found:
        raise UnknownLayout(f"{_seen(tensor)} fits none of {', '.join(tried)} with {spec}; caching stays off")
    if len(set(found.values())) > 1:
        raise UnknownLayout(
            f"{_seen(tensor)} fits {' and '.join(found)} with {spec}; declare the axes, or choose another "
            "block size"
        )
    return next(iter(found.items()))


def check_declared_dtype(tensor: torch.Tensor, declared: torch.dtype) -> None:
    """Raises UnknownLayout unless the tensor's elements are KV of the declared type; fp8 may come as
    bytes.
    """
    try:
        check_dtype("the specification", declared)
        check_dtype(_seen(tensor), tensor.dtype)
    except ValueError as error:
        raise UnknownLayout(f"{error}; caching stays off") from None
    if tensor.dtype != declared and not tensor.element_size() == declared.itemsize == 1:
        raise UnknownLayout(
            f"{_seen(tensor)} has {tensor.element_size()} bytes an element of {tensor.dtype}; the "
            f"specification says {declared}"
        )


def _layout(tensor: torch.Tensor, axes: str, spec: LayerSpec) -> PagedLayout | None:
    """The layout if the tensor's shape is that of the axes, else None."""
    if tensor.dim() != len(axes):
        return None
    size = dict(zip(axes, tensor.shape, strict=True))
    stride = dict(zip(axes, (step * tensor.element_size() for step in tensor.stride()), strict=True))
    head_bytes = (spec.content if spec.joined else spec.head_size) * tensor.element_size()
    fits = (
        size.get("2", 2) == 2
        and size.get("H", spec.num_kv_heads) == spec.num_kv_heads
        and size.get("D", spec.head_size) == spec.head_size
        and size.get("C", spec.content) == spec.content
        and ("C" in size or not spec.joined)
        and size["N"] > 0
        and spec.block_size % size["N"] == 0
        and size["B"] == spec.num_blocks * (spec.block_size // size["N"])
        and ("H" in size or spec.num_kv_heads == 1)
        and tensor.stride(-1) == 1
    )
    if not fits:
        return None
    return PagedLayout(
        kv_stride=0 if spec.planes == 1 else stride.get("2", head_bytes),
        block_stride=stride["B"],
        token_stride=stride["N"],
        head_stride=stride.get("H", head_bytes),
        heads=spec.num_kv_heads,
        head_bytes=head_bytes,
        block_size=size["N"],
        num_blocks=size["B"],
        planes=spec.planes,
    )


@dataclass(frozen=True)
class _Gap:
    """Where a layer's elements stop being dense: after `run` bytes, and they go on after `factor` times as
    many.
    """

    run: int
    factor: int


def _gap(tensor: torch.Tensor) -> _Gap | None:
    """The one place at which other layers may lie between this layer's elements; None for a dense tensor.

    Raises:
        UnknownLayout: elements overlap, or there are gaps that interleaved layers do not make.
    """
    dense = tensor.element_size()
    gap: _Gap | None = None
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        stride = step * tensor.element_size()
        if stride < dense:
            raise UnknownLayout(
                f"{_seen(tensor)} has elements that overlap; each element needs bytes of its own"
            )
        if stride > dense:
            if gap is not None or stride % dense:
                raise UnknownLayout(
                    f"{_seen(tensor)} has gaps between its elements; padded pages are not accepted"
                )
            gap = _Gap(dense, stride // dense)
        dense = stride * size
    return gap


def _check_layers_apart(bases: list[int], gap: _Gap | None, layout: PagedLayout) -> None:
    ordered = sorted(bases)
    if gap is None:
        for low, high in itertools.pairwise(ordered):
            if high - low < layout.extent:
                raise UnknownLayout(
                    f"two layers lie {high - low} bytes apart and take {layout.extent} each: they share "
                    "memory, as "
                    "the groups of hybrid models do; one group of full attention is accepted"
                )
        return
    expected = [ordered[0] + gap.run * index for index in range(gap.factor)]
    if ordered != expected:
        raise UnknownLayout(
            f"{gap.factor - 1} of {gap.factor} parts of {gap.run} bytes between a layer's blocks should be "
            "other "
            f"layers', but {len(ordered)} layers lie at {[base - ordered[0] for base in ordered][:8]} "
            "bytes from the "
            "first: pages are padded or shared with another group, which is not accepted"
        )


def _token_view(tensor: torch.Tensor, axes: str, layout: PagedLayout) -> torch.Tensor:
    """The tensor's bytes as [B, N, planes, H, head bytes], by torch's indexing alone."""
    view = tensor.view(torch.uint8)
    names = axes
    if "C" in names:
        view, names = torch.unflatten(view, -1, (layout.planes, layout.head_bytes)), names.replace("C", "2D")
    if "H" not in names:
        view, names = view.unsqueeze(0), "H" + names
    return view.permute([names.index(name) for name in "BN2HD"])


def device_index(device: torch.device) -> int:
    """The number that the native module knows a device by: -1 for the CPU. Raises UnknownLayout for others
    than CUDA devices.
    """
    if device.type == "cpu":
        return -1
    if device.type != "cuda":
        raise UnknownLayout(f"KV tensors on {device}; cpu and cuda are accepted")
    return device.index if device.index is not None else torch.cuda.current_device()


def _seen(tensor: torch.Tensor) -> str:
    return f"a KV tensor of shape {tuple(tensor.shape)}, stride {tensor.stride()}, {tensor.dtype}"
