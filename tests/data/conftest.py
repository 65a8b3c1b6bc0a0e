"""A trained tokenizer, and its folder."""

import pytest

from tests.helpers.tokenizers import save_folder, trained


@pytest.fixture(scope="module")
def bpe():
    return trained()


@pytest.fixture
def folder(bpe, tmp_path):
    return save_folder(bpe, tmp_path)
