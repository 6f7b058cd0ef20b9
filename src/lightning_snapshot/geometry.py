"""Boxes in n-dimensional arrays: the arithmetic of chunks, shards and resharding.

All offsets and sizes are in elements. A *flat* index counts elements in row-major order. No torch, no I/O.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

import msgspec

__all__ = [
    "Box",
    "box_of_index",
    "boxes_of_flat_range",
    "find_tiling_defect",
    "flat_cover",
    "intersect",
    "rows_apart",
    "split_first_dimension",
    "whole",
]

# Tensors in pieces are cut along one or two dimensions; checking them takes twice the time for each further one.
_MAX_CUT_DIMENSIONS = 6
# Pieces that are compared with each other to say which overlap.
_MAX_COMPARED = 1000


class Box(msgspec.Struct, frozen=True, gc=False):
    """The half-open box ``[offsets[d], offsets[d] + sizes[d])`` in every dimension ``d``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a box without dimensions."""
        return prod(self.sizes)

    def relative_to(self, origin: Sequence[int]) -> "Box":
        """The same box, seen from ``origin``."""
        return Box(tuple(o - base for o, base in zip(self.offsets, origin, strict=True)), self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of an array."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))


@lru_cache(maxsize=4096)
def whole(shape: tuple[int, ...]) -> Box:
    """The box that covers an array of this shape."""
    return Box((0,) * len(shape), shape)


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes; ``None`` if they share no element."""
    offsets = tuple(max(x, y) for x, y in zip(a.offsets, b.offsets, strict=True))
    sizes = tuple(
        min(ao + asize, bo + bsize) - o
        for ao, asize, bo, bsize, o in zip(a.offsets, a.sizes, b.offsets, b.sizes, offsets, strict=True)
    )
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def boxes_of_flat_range(sizes: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Cut the flat range ``[begin, end)`` of an array into boxes, in row-major order.

    Each box is contiguous in row-major order, so consecutive stretches of the range belong to consecutive boxes. There
    are at most ``2 * len(sizes) - 1`` of them.

    Args:
        sizes: Shape of the array, without zeros.
        begin: First flat index.
        end: Flat index behind the last one; ``begin < end <= prod(sizes)``.
    """
    if len(sizes) <= 1:
        yield Box((begin,) * len(sizes), (end - begin,) * len(sizes))
        return
    row = prod(sizes[1:])
    first, head = divmod(begin, row)
    last, tail = divmod(end, row)
    if first == last:
        yield from _in_row(first, sizes, head, tail)
        return
    if head:
        yield from _in_row(first, sizes, head, row)
        first += 1
    if first < last:
        yield Box((first,) + (0,) * (len(sizes) - 1), (last - first, *sizes[1:]))
    if tail:
        yield from _in_row(last, sizes, 0, tail)


def _in_row(row: int, sizes: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    for box in boxes_of_flat_range(sizes[1:], begin, end):
        yield Box((row, *box.offsets), (1, *box.sizes))


def flat_cover(sizes: Sequence[int], box: Box) -> tuple[int, int]:
    """The smallest flat range of an array that holds all elements of a non-empty box inside it."""
    begin = end = 0
    for size, offset, extent in zip(sizes, box.offsets, box.sizes, strict=True):
        begin = begin * size + offset
        end = end * size + offset + extent - 1
    return begin, end + 1


def rows_apart(sizes: Sequence[int], box: Box, min_gap: int) -> Iterator[Box]:
    """Cut a box inside an array into boxes between which much lies that is not wanted.

    Args:
        sizes: Shape of the array.
        box: Inside it.
        min_gap: Stretches of fewer elements than this are not worth leaving out.
    """
    rest = prod(sizes[1:])
    if rest < min_gap or tuple(box.sizes[1:]) == tuple(sizes[1:]):
        yield box
        return
    inner = Box(box.offsets[1:], box.sizes[1:])
    parts = list(rows_apart(sizes[1:], inner, min_gap))
    for row in range(box.offsets[0], box.offsets[0] + box.sizes[0]):
        for part in parts:
            yield Box((row, *part.offsets), (1, *part.sizes))


def box_of_index(shape: Sequence[int], index: object) -> tuple[Box, tuple[int, ...]]:
    """What a basic index of an array selects.

    Args:
        shape: Shape of the array.
        index: An integer, a slice with step 1, ``...``, or a tuple of these.

    Returns:
        The box, and the dimensions that the index removes because it gives an integer for them.

    Raises:
        TypeError: The index is of another kind.
        IndexError: It is out of range, or has too many dimensions.
    """
    given = list(index) if isinstance(index, tuple) else [index]
    # Not given.index(...), because arrays have their own idea of equality.
    ellipses = [position for position, item in enumerate(given) if item is ...]
    if len(ellipses) > 1 or len(given) - len(ellipses) > len(shape):
        msg = f"expected at most {len(shape)} dimensions and one ..., found {index!r}"
        raise IndexError(msg)
    at = ellipses[0] if ellipses else len(given)
    given[at : at + 1] = [slice(None)] * (len(shape) - len(given) + len(ellipses))
    offsets, sizes, removed = [], [], []
    for dimension, (item, size) in enumerate(zip(given, shape, strict=True)):
        if isinstance(item, slice):
            if item.step not in (None, 1):
                msg = f"expected slices with step 1, found {item}"
                raise TypeError(msg)
            begin, end, _ = item.indices(size)
            offsets.append(begin)
            sizes.append(max(0, end - begin))
        elif type(item) is int:
            if not -size <= item < size:
                msg = f"dimension {dimension} has {size} elements, found the index {item}"
                raise IndexError(msg)
            offsets.append(item % size)
            sizes.append(1)
            removed.append(dimension)
        else:
            msg = f"expected integers, slices and ..., found {item!r}"
            raise TypeError(msg)
    return Box(tuple(offsets), tuple(sizes)), tuple(removed)


def split_first_dimension(sizes: Sequence[int], item_bytes: int, limit_bytes: int) -> list[Box]:
    """Cut an array along dimension 0 into equal pieces of whole rows, the last one smaller, as torchsnapshot does.

    Args:
        sizes: Shape of the array.
        item_bytes: Bytes of an element.
        limit_bytes: Bytes of a piece; rounding up to whole rows may add less than one row.
    """
    total = prod(sizes) * item_bytes
    if total <= limit_bytes or not sizes:
        return [whole(tuple(sizes))]
    pieces = -(-total // limit_bytes)
    rows = -(-sizes[0] // pieces)
    rest = tuple(sizes[1:])
    return [
        Box((first,) + (0,) * len(rest), (min(rows, sizes[0] - first), *rest)) for first in range(0, sizes[0], rows)
    ]


def find_tiling_defect(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Say why ``boxes`` do not cover an array of ``shape`` exactly once, or ``None`` if they do.

    Equal boxes count as one: replicas of a shard hold equal data (FORMAT 4.6).
    """
    frame = whole(tuple(shape))
    unique = sorted({(box.offsets, box.sizes) for box in boxes})
    for offsets, sizes in unique:
        if len(offsets) != len(shape):
            return f"a piece has {len(offsets)} dimensions, the tensor {len(shape)}"
        inside = all(o >= 0 and s >= 0 and o + s <= d for o, s, d in zip(offsets, sizes, shape, strict=True))
        if not inside:
            return f"the piece at {list(offsets)} of sizes {list(sizes)} leaves the shape {list(shape)}"
    solid = [Box(offsets, sizes) for offsets, sizes in unique if prod(sizes)]
    if not frame.volume or _add_up_to(frame, solid):
        return None
    covered = sum(box.volume for box in solid)
    few = solid[:_MAX_COMPARED]
    for position, box in enumerate(few):
        for other in few[position + 1 :]:
            # Sorted by offsets: once a box starts behind this one in dimension 0, so do all that follow.
            if other.offsets[0] >= box.offsets[0] + box.sizes[0]:
                break
            if intersect(box, other):
                return f"the pieces at {list(box.offsets)} and {list(other.offsets)} overlap"
    if covered != frame.volume:
        return f"the pieces hold {covered} of {frame.volume} elements"
    return f"some of its {len(solid)} pieces overlap, or they cut it along more than {_MAX_CUT_DIMENSIONS} dimensions"


def _add_up_to(frame: Box, boxes: Sequence[Box]) -> bool:
    """Whether boxes inside a frame hold each of its elements exactly once.

    With a sign that changes along every edge, the corners of boxes cancel out where boxes meet. What is left determines
    how often each element is held: once each, if only the corners of the frame are left. Comparing all boxes with each
    other would take hours for as many as a hostile manifest may have.
    """
    cut = [dimension for dimension, size in enumerate(frame.sizes) if any(b.sizes[dimension] != size for b in boxes)]
    if len(cut) > _MAX_CUT_DIMENSIONS:
        return False
    corners: dict[tuple[int, ...], int] = {}
    for box, weight in [(frame, -1), *((box, 1) for box in boxes)]:
        signed: dict[tuple[int, ...], int] = {(): weight}
        for dimension in cut:
            begin, end = box.offsets[dimension], box.offsets[dimension] + box.sizes[dimension]
            signed = {(*at, edge): sign * s for at, sign in signed.items() for edge, s in ((begin, 1), (end, -1))}
        for at, sign in signed.items():
            corners[at] = corners.get(at, 0) + sign
    return bool(boxes) and not any(corners.values())
