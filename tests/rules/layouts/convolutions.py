"""Cases of convolutions."""

from __future__ import annotations

from tests.rules.layouts.case import Cases, case, f, many

CASES: Cases = {
    **many("avg_pool1d max_pool1d", case(lambda a, b, c: (f(a, b, c), [3], [1], [1]), "0.2")),
    **many("max_pool1d_with_indices", case(lambda a, b, c: (f(a, b, c), [2]), "0.2")),
    **many("adaptive_avg_pool1d adaptive_max_pool1d", case(lambda a, b, c: (f(a, b, c), [3]), "0.2")),
    **many("avg_pool2d max_pool2d max_pool2d_with_indices", case(lambda a, b, c: (f(a, b, 4, c), [2, 2]), "0.2 0.3")),
    **many("adaptive_avg_pool2d adaptive_max_pool2d", case(lambda a, b, c: (f(a, b, 4, c), [2, 1]), "0.2 0.3")),
    **many(
        "avg_pool3d max_pool3d max_pool3d_with_indices", case(lambda a, b, c: (f(b, 4, 2, c), [2, 1, 2]), "0.1 0.2 0.3")
    ),
    **many("adaptive_avg_pool3d adaptive_max_pool3d", case(lambda a, b, c: (f(b, 4, 2, c), [2, 1, 2]), "0.1 0.2 0.3")),
    "upsample_nearest1d": [case(lambda a, b, c: (f(a, b, c), [2 * c]), "0.2")],
    "upsample_linear1d": [case(lambda a, b, c: (f(a, b, c), [2 * c], False), "0.2")],
    **many(
        "upsample_nearest2d _upsample_nearest_exact2d", case(lambda a, b, c: (f(a, b, 2, c), [3, 2 * c]), "0.2 0.3")
    ),
    **many(
        "upsample_bilinear2d upsample_bicubic2d", case(lambda a, b, c: (f(a, b, 2, c), [3, 2 * c], False), "0.2 0.3")
    ),
    "upsample_nearest3d": [case(lambda a, b, c: (f(a, b, 2, 2, c), [2, 3, c]), "0.2 0.3 0.4")],
    "upsample_trilinear3d": [case(lambda a, b, c: (f(a, b, 2, 2, c), [2, 3, c], False), "0.2 0.3 0.4")],
    "pixel_shuffle": [case(lambda a, b, c: (f(a, b, 4, 2, c), 2), "0.2 0.3 0.4")],
    "pixel_unshuffle": [case(lambda a, b, c: (f(a, b, 2, 6, 2), 2), "0.2 0.3 0.4")],
    "channel_shuffle": [case(lambda a, b, c: (f(a, 6, b, c), 3), "0.1")],
    **many(
        "grid_sampler grid_sampler_2d", case(lambda a, b, c: (f(a, b, 4, 6), f(a, c, 6, 2), 0, 0, False), "0.2 0.3 1.3")
    ),
    "conv1d": [
        case(lambda a, b, c: (f(a, b, c), f(b, 1, 4), f(b), [1], [3], [1], b), "0.2 1.2"),  # depthwise, causal
        case(lambda a, b, c: (f(b, c), f(b, 1, 3), None, [1], "same", [1], b), "0.1"),
        case(lambda a, b, c: (f(a, 2 * b, c), f(3 * b, 2, 3), None, [1], [0], [1], b), "0.2"),
        case(lambda a, b, c: (f(a, 4 * b, c), f(2 * b, b, 3), None, [1], [1], [1], 4), "0.2"),
        case(lambda a, b, c: (f(a, b, c), f(8, b, 3), f(8), [2], [1]), "0.2"),  # a bias is added once
        case(lambda a, b, c: (f(a, b, c), f(8, b, 3), None, [1], [2], [2]), "0.2"),
        case(lambda a, b, c: (f(a, b, c), f(8, b, 1), None, [1], [0], [2])),  # one position each, so no gaps between
        case(lambda a, b, c: (f(a, b, 2 * c), f(8, b, 2), None, [2], "valid"), "1.2"),
        case(lambda a, b, c: (f(a, b, 2 * c), f(8, b, 2), None, [2], [0], [2]), "0.2 1.2"),  # with gaps between
    ],
    "conv2d": [
        case(lambda a, b, c: (f(a, 4, 2 * b, 2 * c), f(8, 4, 2, 2), f(8), [2, 2]), "1.2 1.3"),  # patches
        case(lambda a, b, c: (f(a, b, 5, c), f(b, 1, 2, 2), None, [2, 1], [0], [1], b), "0.3 1.2 1.3"),
    ],
    "conv3d": [case(lambda a, b, c: (f(a, b, 3, 4, 5), f(4, b, 3, 2, 5), None, [1, 2, 1]), "1.3")],
    "conv_transpose1d": [
        case(lambda a, b, c: (f(a, b, c), f(b, 3, 4), None, [2], [1], [0], b), "0.2 1.2"),
        case(lambda a, b, c: (f(a, b, c), f(b, 8, 4), f(8), [4]), "1.2"),
        case(lambda a, b, c: (f(a, b, c), f(b, 8, 3), None, [2], [1], [1], 2), "0.2"),
    ],
    "conv_transpose2d": [case(lambda a, b, c: (f(a, 2, b, c), f(2, 4, 2, 3), None, [2, 3]), "1.2")],
    "conv_transpose3d": [case(lambda a, b, c: (f(a, 4, 2, 2, 2), f(4, 2, 1, 1, 2)), "0.4 1.4")],
}
