# SPDX-License-Identifier: Apache-2.0
"""The native data plane (csrc/). Memory comes as addresses, CUDA streams as integers; long calls release the
GIL.
"""

from collections.abc import Sequence
from typing import Literal, TypedDict, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

class BuildInfo(TypedDict):
    cuda: bool
    architectures: list[str]
    compiler: str
    cuda_compiler: str

def build_info() -> BuildInfo: ...
def cuda_available() -> bool:
    """Whether the driver answers for a GPU now."""

def dma_in_batches() -> bool:
    """Whether this build hands many copies to a copy engine in one operation: with CUDA 13 and later."""

def cuda_unavailable_reason() -> str:
    """Why `cuda_available()` is False; empty when it is True."""

# hashing

def token_ids(tokens: list[int], start: int, stop: int) -> npt.NDArray[np.int32]:
    """The token ids `[start, stop)` of a list as int32, read where they lie.

    Raises:
        ValueError: one that is no integer from 0 to 2^31 - 1, or a range outside of the list.
    """

def chunk_hashes(
    tokens: npt.NDArray[np.int32], chunk_size: int, parent: bytes, secret: bytes, tail: bool = False
) -> bytes:
    """16 bytes for each full chunk, and with `tail` 16 more for a partial last one.

    `H_i = X(H_{i-1} || X(tokens of chunk i as little-endian int32))` with `H_{-1} = parent`; X is XXH3-128 in
    its canonical (big-endian) form, keyed by the 192 bytes `XXH3-128(seed=n, secret)` for n = 0..11.

    Raises:
        ValueError: not a contiguous one-dimensional int32 array, a chunk size below 1, or a parent or secret
            that has not 16 bytes.
    """

def xxh3_128(data: Buffer, piece: int | None = None) -> bytes:
    """Plain XXH3-128 of the buffer, or of its last piece after hashing all pieces: the yardstick of the
    bench.
    """

@final
class Xxh3_128:  # noqa: N801 -- as the library names it
    """Plain XXH3-128 of bytes that come piece by piece. For one thread at a time."""

    def __init__(self) -> None: ...
    def update(self, data: Buffer) -> None: ...
    def digest(self) -> bytes:
        """16 bytes, canonical, of all so far."""

# memory

@final
class HostRegion:
    """One range of host memory, populated and page-locked in the background. Exports the whole as a buffer of
    uint8.
    """

    def __init__(self, capacity: int, huge_pages: bool = True) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def prepare(
        self,
        pin: bool,
        granule: int,
        required: bool = False,
        numa_node: int = -1,
        populate: bool = True,
        hold: bool = False,
        device: int = 0,
    ) -> None:
        """Starts the background work. No multiple of `granule` bytes straddles two page-locked pieces. With
        `hold` nothing is page-locked before `start_pinning`. `device`: whose copies the memory is for.
        """

    def start_pinning(self) -> None: ...
    def close(self) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def state(self) -> Literal["Pageable", "Pinning", "Pinned", "PinningFailed"]: ...
    @property
    def reason(self) -> str: ...
    @property
    def populated_bytes(self) -> int: ...
    @property
    def pinned_bytes(self) -> int: ...
    @property
    def ready_bytes(self) -> int:
        """Bytes from the start that may be used now."""

def is_pinned(address: int, num_bytes: int) -> bool:
    """Whether the range lies in the page-locked part of an open region."""

def use_device(device: int) -> None:
    """This thread's calls are for the CUDA device from now on. A thread begins with device 0, of whose memory
    its first call takes some hundred MiB, though all its work be for another one. Does nothing without CUDA.
    """

def device_reaches(addresses: npt.NDArray[np.uint64]) -> bool:
    """Whether all of the addresses lie in device memory or page-locked host memory."""

def numa_node(device: int) -> int:
    """NUMA node of a CUDA device; -1 when unknown."""

# transfer

@final
class PagedLayout:
    """Where one layer's pages lie over a base address; all strides in bytes.

    `address(plane, block, token, head) = base + plane*kv_stride + block*block_stride + token*token_stride +
    head*head_stride`, and `head_bytes` contiguous bytes from there. `planes` is 2 for keys and values, 1 for
    MLA.

    Raises:
        ValueError: a field that cannot be; the text names it.
    """

    def __init__(
        self,
        *,
        kv_stride: int,
        block_stride: int,
        token_stride: int,
        head_stride: int,
        heads: int,
        head_bytes: int,
        block_size: int,
        num_blocks: int,
        planes: int,
    ) -> None: ...
    @property
    def kv_stride(self) -> int: ...
    @property
    def block_stride(self) -> int: ...
    @property
    def token_stride(self) -> int: ...
    @property
    def head_stride(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def head_bytes(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def planes(self) -> int: ...
    @property
    def row_bytes(self) -> int:
        """Bytes of one token's key (or value, or latent) over all heads."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer, all planes."""

    @property
    def num_slots(self) -> int: ...
    @property
    def extent(self) -> int:
        """Bytes from the base to the end of the last element."""

@final
class Pages:
    """The pages of all layers.

    Args:
        bases: uint64, one address a layer.
        layout: of each.
        device: CUDA device, -1 for host memory.
        coded: chunks hold each row (a token's keys, or its values, of one layer) of bfloat16 in fewer bytes,
            without loss (format: `csrc/include/row_codec.h`).

    Raises:
        ValueError: the address 0; with `coded` rows that are no multiple of 64 bytes, or heads of no multiple
            of 16.
    """

    def __init__(
        self, bases: npt.NDArray[np.uint64], layout: PagedLayout, device: int = -1, coded: bool = False
    ) -> None: ...
    @staticmethod
    def unilateral(
        key_bases: npt.NDArray[np.uint64],
        value_bases: npt.NDArray[np.uint64],
        layout: PagedLayout,
        device: int = -1,
    ) -> Pages:
        """Keys and values in separate pools; the layout's kv_stride is not used."""

    @property
    def layout(self) -> PagedLayout: ...
    @property
    def device(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def coded(self) -> bool: ...
    def uncoded(self) -> Pages:
        """The same pages, for chunks that hold rows as they are."""

    @property
    def chunk_row_bytes(self) -> int:
        """Of a token's keys, or of its values, of one layer in a chunk."""

    @property
    def chunk_token_bytes(self) -> int:
        """Of a token's KV of one layer in a chunk."""

    @property
    def expands_in_place(self) -> bool:
        """Whether coded rows may come into the pages and become elements there: a token's rows fill all bytes
        from it to the next, and addresses and distances are multiples of 16.
        """

@final
class Event:
    """A CUDA event of a pool, to which it returns with the object. A stream that was told to wait for it
    needs the object no more. Thread-safe.

    Args:
        device: CUDA device.
        sleeping: `wait` sleeps instead of asking again and again.

    Raises:
        RuntimeError: CUDA's reason.
    """

    def __init__(self, device: int, sleeping: bool = False) -> None: ...
    @property
    def device(self) -> int: ...
    @property
    def handle(self) -> int: ...
    def record(self, stream: int) -> None:
        """Behind what the stream, one of the device, was given so far."""

    def order(self, stream: int) -> None:
        """What the stream, one of the device, is given next comes behind the event."""

    def done(self) -> bool:
        """Whether the device has come to it."""

    def wait(self) -> None:
        """Until it has."""

def slots_of(
    block_ids: list[int], block_size: int, num_tokens: int, first: int, end: int
) -> npt.NDArray[np.int64]:
    """int64 [num_tokens]: the slots of the first tokens of these blocks, -1 outside of `[first, end)`.

    Raises:
        ValueError: a block that is no integer from 0 to 2^31 - 1, or fewer of them than tokens need.
    """

def coded_row_bytes(elements: int) -> int:
    """Of a coded row of so many elements, a multiple of 32."""

def code_escapes(elements: int) -> int:
    """Elements of a coded row of so many whose exponents have no code of three bits."""

def batched_kv_transfer(
    pages: Pages,
    addresses: npt.NDArray[np.uint64],
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    slot_mapping: npt.NDArray[np.int64],
    store: bool,
    *,
    token_major: bool = True,
    layer_begin: int = 0,
    layer_end: int | None = None,
    stream: int = 0,
    blocks: int = 0,
    refused: int = 0,
    group_layers: int = 0,
    events: Sequence[int] = (),
) -> None:
    """Copies pages to chunks (`store`) or back: one call for many chunks that share a slot mapping.

    Chunk i holds the tokens `[starts[i], ends[i])` of the mapping for the layers `[layer_begin, layer_end)`,
    as `[layers, tokens, planes, row]` (`token_major`) or `[planes, layers, tokens, row]`, from `addresses[i]`
    on. Host pages: done on return. CUDA pages: queued on `stream`; chunks lie in device or page-locked memory
    and `blocks` thread blocks (0: one a multiprocessor) do the work.

    A store of coded rows sets, of the int32 [chunks] at the address `refused` (page-locked for CUDA pages),
    those of chunks to 1 in which a row has no code: such a chunk is worth nothing.

    CUDA pages: the layers are copied `group_layers` at a time (0: all at once), and behind each group the
    next of the `events` (handles of CUDA events, one a group, or none) is recorded.

    Raises:
        ValueError: a chunk outside of the mapping or a slot that is neither -1 (skip) nor within the pages;
            the text names index and value, and nothing was written. A group below 0 layers, or another number
            of events than of groups.
        RuntimeError: CUDA's reason.
    """

def expand_in_place(
    pages: Pages,
    addresses: npt.NDArray[np.uint64],
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    slot_mapping: npt.NDArray[np.int64],
    *,
    layer_begin: int = 0,
    layer_end: int | None = None,
    stream: int = 0,
) -> None:
    """Coded rows that a `strided_dma` of the same chunks, or of parts of them, has brought into the pages
    become elements there. Host pages: done on return. CUDA pages: queued on `stream`, by a kernel on all
    multiprocessors.

    Args:
        addresses: of the chunks; what lies there is not read.

    Raises:
        ValueError: as `batched_kv_transfer`; pages that do not expand in place, or two tokens with one slot.
        RuntimeError: CUDA's reason.
    """

def multi_layer_kv_transfer(
    pages: Pages,
    address: int,
    slot_mapping: npt.NDArray[np.int64],
    store: bool,
    *,
    token_major: bool = True,
    stream: int = 0,
    blocks: int = 0,
) -> None:
    """`batched_kv_transfer` for one chunk that holds the whole mapping, all layers."""

def single_layer_kv_transfer(
    pages: Pages,
    layer: int,
    address: int,
    slot_mapping: npt.NDArray[np.int64],
    store: bool,
    *,
    token_major: bool = True,
    stream: int = 0,
    blocks: int = 0,
) -> None:
    """`batched_kv_transfer` for one chunk that holds the whole mapping, one layer."""

@final
class StagingRing:
    """Slots in device memory through which one direction's copies go. Thread-safe.

    Device -1: in host memory, and copies are done on return.

    Args:
        turn: so many slots' DMAs go to one stream, the next ones to another behind them, so that others'
            copies get in between; 0: all go to one.

    Raises:
        ValueError: a size or number of slots below 1, a turn below 0.
        RuntimeError: CUDA's reason, such as no memory.
    """

    def __init__(self, device: int, slot_bytes: int, num_slots: int, turn: int = 0) -> None: ...
    def transfer(
        self,
        pages: Pages,
        addresses: npt.NDArray[np.uint64],
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        slot_mapping: npt.NDArray[np.int64],
        store: bool,
        *,
        layer_begin: int = 0,
        layer_end: int | None = None,
        stream: int = 0,
        blocks: int = 0,
        refused: int = 0,
    ) -> None:
        """`batched_kv_transfer` of token-major chunks through the ring.

        The kernels run on `stream`, the DMAs on the ring's own stream: those of a load do not wait for what
        is on `stream`; those of a store end after it, see `record`.
        """

    def strided_dma(
        self,
        pages: Pages,
        addresses: npt.NDArray[np.uint64],
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        slot_mapping: npt.NDArray[np.int64],
        store: bool,
        *,
        layer_begin: int = 0,
        layer_end: int | None = None,
        stream: int = 0,
    ) -> None:
        """`transfer` without a kernel and past the slots: the copy engine moves what lies at regular
        distances on both sides, the tokens of a block in all layers, by itself. Behind what `stream` was
        given, which must not be the default stream, and before what it is given next. With turns in portions
        of a slot's bytes that take them, each of at least one run.

        Of coded rows it brings the codes into the pages; the rows have come when `expand_in_place` has run.

        Raises:
            ValueError: as there; of coded rows a store, pages that do not expand in place, or two tokens with
                one slot.
            RuntimeError: CUDA's reason.
        """

    def record(self, event: int) -> None:
        """Records a CUDA event (its handle) behind all DMAs so far; no stream waits for them."""

# rotation and zeroing

def rotate_keys(
    *,
    keys: int,
    heads: int,
    head_size: int,
    token_stride: int,
    head_stride: int,
    dtype: str,
    old_positions: npt.NDArray[np.int64],
    new_positions: npt.NDArray[np.int64],
    table: int,
    positions: int,
    rotary_size: int,
    table_dtype: str,
    neox: bool,
    device: int = -1,
    stream: int = 0,
) -> None:
    """Moves keys `[tokens, heads, head_size]` (strides in bytes) from their old to their new positions, in
    place.

    `table`: contiguous `[positions, rotary_size]`, cosines then sines. The first `rotary_size` elements of a
    head are rotated, in pairs `(i, i + rotary_size/2)` (`neox`) or `(2i, 2i + 1)`. One rotation by the
    difference in float32, one rounding to nearest even (float8: saturating); equal positions change nothing.

    Raises:
        ValueError: a dtype, size or position that is not accepted.
    """

def copy_spans(
    targets: npt.NDArray[np.uint64],
    sources: npt.NDArray[np.uint64],
    sizes: npt.NDArray[np.int64],
    device: int = -1,
    stream: int = 0,
) -> None:
    """Copies byte ranges: in host memory at once, else queued on `stream`, which must not be the default
    stream.
    """

def zero_spans(
    addresses: npt.NDArray[np.uint64], sizes: npt.NDArray[np.int64], device: int = -1, stream: int = 0
) -> None:
    """Fills byte ranges with zeros."""

# files

@final
class Uring:
    """Reads and writes of files through io_uring, at most `depth` at a time. For one thread.

    Raises:
        OSError: the kernel has none or does not let this process use it (ENOSYS, EPERM), or no memory for it.
        ValueError: a depth below 1 or above 1024.
    """

    def __init__(self, depth: int) -> None: ...
    def submit(
        self,
        tag: int,
        fd: int,
        offset: int,
        buffers: Sequence[Buffer],
        write: bool,
        durable: bool = False,
    ) -> None:
        """Starts a transfer between a file from `offset` on and the buffers, one after the other. The buffers
        are held until `wait` gives the tag back. `durable`: what is written is on the device then.

        Raises:
            ValueError: a buffer that is not contiguous, none at all, or a tag that is under way; also one
                transfer more than the depth.
            OSError: the kernel did not take it.
        """

    def wait(self) -> tuple[int, int]:
        """The next transfer that ended: its tag, and its bytes (fewer than asked for only at the end of the
        file) or the negative errno.

        Raises:
            RuntimeError: nothing is under way.
            OSError: the kernel cannot be asked.
        """

    def close(self) -> None:
        """Waits for what is under way. Idempotent."""

    @property
    def under_way(self) -> int: ...
