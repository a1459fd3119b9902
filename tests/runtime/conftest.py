from pathlib import Path

import pytest
import tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.make(tmp_path_factory.mktemp("tiny-llama"))
