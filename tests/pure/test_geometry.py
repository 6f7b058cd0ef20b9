"""Boxes: every property is checked against sets of index tuples."""

import re
from itertools import pairwise, product
from math import prod

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_snapshot.geometry import (
    Box,
    box_of_index,
    boxes_of_flat_range,
    find_tiling_defect,
    flat_cover,
    intersect,
    rows_apart,
    split_first_dimension,
    whole,
)
from tests.engine.strategies import basic_indices

SIZES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


def cells(box: Box) -> list[tuple[int, ...]]:
    """Index of each element, in row-major order."""
    return list(product(*(range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))))


@st.composite
def boxes_in(draw, sizes: tuple[int, ...], smallest: int = 0) -> Box:
    extents = [draw(st.integers(smallest, size)) for size in sizes]
    offsets = [draw(st.integers(0, size - extent)) for size, extent in zip(sizes, extents, strict=True)]
    return Box(tuple(offsets), tuple(extents))


@st.composite
def tilings(draw, box: Box) -> list[Box]:
    """Boxes that tile a box, by cutting it again and again."""
    splittable = [d for d, size in enumerate(box.sizes) if size > 1]
    if not splittable or not draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from(splittable))
    cut = draw(st.integers(1, box.sizes[dim] - 1))

    def part(start: int, size: int) -> Box:
        return Box(
            (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :]),
            (*box.sizes[:dim], size, *box.sizes[dim + 1 :]),
        )

    return draw(tilings(part(0, cut))) + draw(tilings(part(cut, box.sizes[dim] - cut)))


@given(st.data(), SIZES)
def test_the_common_part_of_two_boxes_has_their_common_elements(data, sizes):
    a, b = data.draw(boxes_in(sizes)), data.draw(boxes_in(sizes))
    common = intersect(a, b)
    assert (set() if common is None else set(cells(common))) == set(cells(a)) & set(cells(b))
    assert common is None or common.volume == len(cells(common)) > 0


@given(st.data(), SIZES)
def test_boxes_of_a_flat_range_give_its_elements_in_order(data, sizes):
    begin = data.draw(st.integers(0, prod(sizes) - 1))
    end = data.draw(st.integers(begin + 1, prod(sizes)))
    boxes = list(boxes_of_flat_range(sizes, begin, end))
    assert [cell for box in boxes for cell in cells(box)] == cells(whole(sizes))[begin:end]
    assert len(boxes) <= max(1, 2 * len(sizes) - 1)


@given(st.data(), SIZES)
def test_the_flat_cover_is_the_smallest_range_that_holds_a_box(data, sizes):
    box = data.draw(boxes_in(sizes, smallest=1))
    order = {cell: index for index, cell in enumerate(cells(whole(sizes)))}
    positions = [order[cell] for cell in cells(box)]
    assert flat_cover(sizes, box) == (min(positions), max(positions) + 1)


@given(st.data(), SIZES, st.integers(1, 40))
def test_a_box_is_cut_where_much_lies_between_its_elements_and_only_there(data, sizes, min_gap):
    box = data.draw(boxes_in(sizes, smallest=1))
    parts = list(rows_apart(sizes, box, min_gap))
    assert [cell for part in parts for cell in cells(part)] == cells(box)
    order = {cell: index for index, cell in enumerate(cells(whole(sizes)))}
    for part in parts:
        positions = [order[cell] for cell in cells(part)]
        assert all(after - before <= min_gap for before, after in pairwise(positions))
    # Nobody cuts along rows that are short, or wanted as a whole.
    if prod(sizes[1:]) < min_gap or box.sizes[1:] == sizes[1:]:
        assert parts == [box]


@given(st.data(), st.lists(st.integers(0, 4), max_size=4).map(tuple))
def test_an_index_selects_what_numpy_selects(data, shape):
    index = data.draw(basic_indices(shape))
    array = numpy.arange(prod(shape)).reshape(shape)
    box, removed = box_of_index(shape, index)
    assert len(box.sizes) == len(shape)
    selected = array[box.slices]
    assert selected.shape == box.sizes
    assert numpy.array_equal(selected.squeeze(removed), array[index])
    assert selected.squeeze(removed).shape == numpy.shape(array[index])


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        ((0, 0, 0), IndexError, "expected at most 2 dimensions and one ..., found (0, 0, 0)"),
        ((0, ..., 0, 0), IndexError, "expected at most 2 dimensions"),
        ((..., ...), IndexError, "expected at most 2 dimensions and one ..."),
        (4, IndexError, "dimension 0 has 4 elements, found the index 4"),
        ((slice(None), -4), IndexError, "dimension 1 has 3 elements, found the index -4"),
        (slice(None, None, 2), TypeError, "expected slices with step 1, found slice(None, None, 2)"),
        (slice(None, None, -1), TypeError, "expected slices with step 1"),
        (slice(None, None, 0), TypeError, "expected slices with step 1"),
        (slice("a"), TypeError, "slice indices must be integers"),
        (None, TypeError, "expected integers, slices and ..., found None"),
        ((0, None), TypeError, "found None"),
        (True, TypeError, "found True"),
        ([0, 1], TypeError, "found [0, 1]"),
        (1.0, TypeError, "found 1.0"),
        ("0", TypeError, "found '0'"),
        (numpy.array([True, False, True, False]), TypeError, "found array"),
        ((numpy.array([0, 1]), 1), TypeError, "found array"),
    ],
)  # fmt: skip
def test_an_index_that_selects_no_box_is_refused(index, error, message):
    with pytest.raises(error) as caught:
        box_of_index((4, 3), index)
    assert message in str(caught.value)


@given(st.data(), SIZES)
def test_a_box_relative_to_an_origin_keeps_its_elements(data, sizes):
    outer = data.draw(boxes_in(sizes, smallest=1))
    inner = data.draw(boxes_in(outer.sizes))
    moved = Box(tuple(o + i for o, i in zip(outer.offsets, inner.offsets, strict=True)), inner.sizes)
    assert moved.relative_to(outer.offsets) == inner


@pytest.mark.parametrize(
    ("sizes", "item_bytes", "limit_bytes", "rows"),
    [
        ((10, 3), 4, 64, [5, 5]),  # the two examples of the format's description
        ((33,), 8, 64, [7, 7, 7, 7, 5]),
        ((16,), 4, 64, [16]),  # exactly the limit
        ((17,), 4, 64, [9, 8]),
        ((1, 100), 4, 64, [1]),  # one row larger than the limit
        ((2, 100), 4, 64, [1, 1]),
        ((5, 5), 8, 64, [2, 2, 1]),  # fewer pieces than bytes / limit, rounded up
    ],
)
def test_large_arrays_are_cut_into_rows_as_torchsnapshot_cuts_them(sizes, item_bytes, limit_bytes, rows):
    pieces = split_first_dimension(sizes, item_bytes, limit_bytes)
    assert [piece.sizes[0] for piece in pieces] == rows
    assert all(piece.sizes[1:] == sizes[1:] for piece in pieces)
    assert find_tiling_defect(sizes, pieces) is None


@pytest.mark.parametrize("sizes", [(), (0,), (3, 0, 2)])
def test_what_cannot_be_cut_stays_whole(sizes):
    assert split_first_dimension(sizes, 16, 1) == [whole(sizes)]


@given(SIZES, st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 200))
def test_pieces_tile_the_array_in_order_and_respect_the_limit(sizes, item_bytes, limit_bytes):
    pieces = split_first_dimension(sizes, item_bytes, limit_bytes)
    assert [cell for piece in pieces for cell in cells(piece)] == cells(whole(sizes))
    assert all(piece.volume for piece in pieces)
    row_bytes = prod(sizes[1:]) * item_bytes
    assert len(pieces) == 1 or all(piece.volume * item_bytes < limit_bytes + row_bytes for piece in pieces)


@given(st.data(), SIZES)
def test_tilings_have_no_defect_in_any_order_and_with_replicas(data, sizes):
    boxes = data.draw(tilings(whole(sizes)))
    replicas = data.draw(st.lists(st.sampled_from(boxes), max_size=3))
    assert find_tiling_defect(sizes, data.draw(st.permutations(boxes + replicas))) is None


@given(st.data(), SIZES)
def test_a_defect_is_found_exactly_if_some_element_is_not_covered_once(data, sizes):
    boxes = data.draw(
        st.lists(st.one_of(boxes_in(sizes), tilings(whole(sizes)).map(lambda tiles: tiles[0])), max_size=5)
    )
    if data.draw(st.booleans()):
        boxes += data.draw(tilings(whole(sizes)))
    times = [sum(cell in cells(box) for box in set(boxes)) for cell in cells(whole(sizes))]
    assert (find_tiling_defect(sizes, boxes) is None) == (set(times) == {1})


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([Box((0, 0), (2, 3))], "the pieces hold 6 of 12 elements"),
        ([], "the pieces hold 0 of 12 elements"),
        ([Box((0, 0), (3, 3)), Box((2, 0), (2, 3))], r"the pieces at \[0, 0\] and \[2, 0\] overlap"),
        ([Box((0, 0), (4, 4))], r"the piece at \[0, 0\] of sizes \[4, 4\] leaves the shape \[4, 3\]"),
        ([Box((-1, 0), (4, 3))], r"the piece at \[-1, 0\] of sizes \[4, 3\] leaves the shape \[4, 3\]"),
        ([Box((0,), (12,))], "a piece has 1 dimensions, the tensor 2"),
    ],
)
def test_defects_are_described_with_their_numbers(boxes, message):
    assert re.fullmatch(message, find_tiling_defect((4, 3), boxes) or "")


def test_empty_arrays_are_tiled_by_empty_boxes_or_none():
    assert find_tiling_defect((0, 3), []) is None
    assert find_tiling_defect((0, 3), [Box((0, 0), (0, 3))]) is None
    assert find_tiling_defect((), [Box((), ())]) is None
    assert find_tiling_defect((), []) == "the pieces hold 0 of 1 elements"
