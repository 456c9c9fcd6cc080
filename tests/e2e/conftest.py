import pytest
import toy


@pytest.fixture
def folder(tmp_path):
    toy.make_folder(tmp_path)
    return tmp_path
