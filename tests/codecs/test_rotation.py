"""Hadamard rotations: where they apply, that they are undone, and that their sums are exact."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_lm_kvcache_plugin.codecs.rotation import (
    grid_offset,
    hadamard_applies,
    is_power_of_two,
    matrix,
    mix_groups,
    norm,
    rotate,
    unrotate,
)

LARGEST_WIDTH = 2048

HADAMARD_WIDTHS = sorted(
    m * 2**k for m in (1, 12, 20, 28) for k in range(12) if m * 2**k <= LARGEST_WIDTH
)


def normal(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(3).normal(size=shape).astype(np.float32))


def test_widths_that_can_be_rotated() -> None:
    """Only m * 2^k with m in 1, 12, 20, 28; mlx neither refuses all others nor survives them."""
    applies = [width for width in range(LARGEST_WIDTH + 1) if hadamard_applies(width)]
    assert applies == HADAMARD_WIDTHS
    assert not set(applies) & {0, 3, 5, 6, 7, 10, 14, 36, 44, 60, 72, 144, 288, 576, 1152}
    powers = [width for width in range(LARGEST_WIDTH + 1) if is_power_of_two(width)]
    assert powers == [2**k for k in range(12)]


@pytest.mark.parametrize("width", HADAMARD_WIDTHS)
def test_unrotating_undoes_rotating(width: int) -> None:
    """In either order, and lengths stay: the matrix is orthogonal, if not always symmetric."""
    x, factor = normal(3, width), norm(width)
    rotated = rotate(x) * factor
    assert mx.allclose(unrotate(rotated) * factor, x, rtol=0, atol=2e-5)
    assert mx.allclose(rotate(unrotate(x) * factor) * factor, x, rtol=0, atol=2e-5)
    assert mx.allclose(mx.linalg.norm(rotated, axis=-1), mx.linalg.norm(x, axis=-1), rtol=1e-5)


@pytest.mark.parametrize("width", HADAMARD_WIDTHS[1:])
def test_rotating_spreads_an_outlier(width: int) -> None:
    """One large channel becomes all channels of one size: that is what it is for."""
    outlier = mx.zeros((1, width))
    outlier[0, width // 2] = 1.0
    assert mx.array_equal(mx.abs(rotate(outlier)), mx.ones((1, width)))


@pytest.mark.parametrize("width", [36, 44, 72, 576, 15, 35])
def test_other_widths_stay_as_they_are(width: int) -> None:
    """Where there is no such matrix nothing is rotated, there and back."""
    x = normal(2, width)
    assert mx.array_equal(rotate(x), x) and mx.array_equal(unrotate(x), x)
    assert norm(width) == 1


@pytest.mark.parametrize("width", [2**k for k in range(12)])
def test_the_matrix_is_that_of_the_rotation(width: int) -> None:
    """For powers of two: what numpy multiplies with is what MLX's kernel does."""
    assert np.array_equal(matrix(width), np.array(rotate(mx.eye(width))))


@pytest.mark.parametrize(("groups", "width"), [(1, 64), (2, 64), (4, 32), (8, 64), (16, 4)])
def test_the_matrix_of_a_row_is_that_of_its_groups_times_that_of_a_group(
    groups: int, width: int
) -> None:
    """For numpy and MLX alike."""
    x = np.random.default_rng(1).integers(-99, 99, (3, groups, width)).astype(np.float32)
    whole = x.reshape(3, -1) @ matrix(groups * width)
    for array in (x, mx.array(x)):
        mixed = mix_groups(array @ (matrix(width) if array is x else mx.array(matrix(width))))
        assert np.array_equal(np.array(mixed).reshape(3, -1), whole)


@pytest.mark.parametrize("width", [64, 96, 128, 512])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0, 6e4])
def test_on_the_grid_sums_are_exact(width: int, size: float) -> None:
    """In whatever order they are added: float64 finds the same. And the grid is a fine one."""
    x = np.array(normal(40, width)) * np.float32(size)
    peak = np.abs(x).max(keepdims=True)
    offset = grid_offset(peak, width)
    assert np.array_equal(offset, np.array(grid_offset(mx.array(peak), width)))
    on_grid = (x + offset) - offset
    exact = on_grid.astype(np.float64) @ np.array(rotate(mx.eye(width))).astype(np.float64)
    assert np.array_equal(np.array(rotate(mx.array(on_grid))), exact)
    assert np.abs(on_grid - x).max() <= peak * width / 2**22


def test_zeros_stay_on_the_grid() -> None:
    """A block of nothing but its mean."""
    assert np.array_equal(grid_offset(np.zeros(3, np.float32), 64), np.zeros(3))
