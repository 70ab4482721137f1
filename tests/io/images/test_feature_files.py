"""Files of features, and the images that a batch asks them for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatrain_ray.io.images.feature_files import FeatureMeta, FeatureReader, append_features, finish_features


def test_each_image_of_a_row_is_found_once(tmp_path: Path) -> None:
    """Texts stand between the tokens of an image, as between Gemma 3's crops; the same image follows at once."""
    features = [np.full((1, 4, 8), value, np.float32) for value in (1, 2)]
    append_features(tmp_path, features, [4, 4], [])
    finish_features(tmp_path, {}, FeatureMeta(2, 8, 8, 1, [8], 4, ()))
    rows = np.array(
        [[0, 2, 2, 0, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 0], [0] * 15, [0, 1, 1, 1, 1, 0, 0, 0, 0, 2, 2, 2, 2, 0, 0]]
    )
    found = FeatureReader([tmp_path]).of(rows, range(3))
    assert [(image.row, image.features[0, 0, 0]) for image in found] == [(0, 2), (0, 1), (0, 1), (2, 1), (2, 2)]
