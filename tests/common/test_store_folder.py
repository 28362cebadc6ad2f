"""Test paths of stores."""

from pathlib import Path

import pytest

from fewbits.common.store_folder import store_folder


@pytest.mark.parametrize("text", ["s3://bucket/runs", "gs://b", "S3A://b", "https://host/runs", "file:///mnt/runs"])
def test_a_url_is_no_store(text: str) -> None:
    with pytest.raises(ValueError, match="a store is a folder") as error:
        store_folder(text)
    assert text in str(error.value)
    assert ("write /mnt/runs" in str(error.value)) == text.startswith("file:")


@pytest.mark.parametrize("text", ["runs", "/mnt/runs", "./a:b", "~/runs", "a//b", "C:"])
def test_a_path_is_a_store(text: str) -> None:
    assert store_folder(text) == Path(text).expanduser()
