"""Test splits of folders saved by `datasets` or downloaded from the Hub."""

import json
import os

import pytest

pytest.importorskip("pyarrow", reason="the [nemo] extra is not installed")

from superpod.data.readers import dataset_folder, sources
from superpod.data.samples import samples
from superpod.errors import UserError
from superpod.weights.finetuning import packed_data
from superpod.weights.finetuning.packed_data import DataOptions
from tests.data.readers.test_rows import PAIRS, write_arrow, write_parquet

README = "---\nlicense: mit\nconfigs:\n{}---\n# Data\n"


def saved(folder, count=2):
    """Write a dataset like `save_to_disk`."""
    folder.mkdir(parents=True)
    names = [f"data-{at:05d}-of-{count:05d}.arrow" for at in range(count)]
    for name in names:
        write_arrow(folder / name, PAIRS[:10])
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def several(folder, *splits):
    for split in splits:
        saved(folder / split)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": splits}))


def hub(folder, *names, readme=""):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_parquet(folder / name, PAIRS[:10])
    (folder / "README.md").write_text(README.format(readme) if readme else "---\n- : [\n---")
    (folder / ".git").mkdir()
    (folder / ".git" / "x.parquet").write_text("")


def names(folder):
    return {
        split: [str(file.relative_to(folder)) for file in files]
        for split, files in dataset_folder.find_splits(folder).items()
    }


def test_saved_dataset(tmp_path):
    saved(tmp_path / "one")
    assert names(tmp_path / "one") == {"train": ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]}
    several(tmp_path / "all", "train", "validation", "test")
    assert list(names(tmp_path / "all")) == ["train", "validation", "test"]
    [source] = sources.find_sources([str(tmp_path / "all")])
    assert len(list(samples.stream_samples(source.files, samples.BadLines()))) == 20
    assert [file.parent.name for file in source.validation] == ["validation"] * 2


@pytest.mark.slow
def test_reads_saved_datasets_like_datasets(tmp_path):
    import datasets

    rows = [{"messages": [{"role": "user", "content": f"é {at}"}, {"role": "assistant", "content": "b"}], "n": at}
            for at in range(500)]  # fmt: skip
    whole = datasets.Dataset.from_list(rows)
    splits = {"train": whole.shuffle(seed=1).select(range(300)), "validation": whole.select(range(50))}
    both = datasets.DatasetDict(splits)  # type: ignore[call-overload]
    both.save_to_disk(str(tmp_path / "saved"), num_shards={"train": 3, "validation": 1})
    [source] = sources.find_sources([str(tmp_path / "saved")])
    for files, split in ((source.files, "train"), (source.validation, "validation")):
        read = list(samples.stream_samples(files, samples.BadLines()))
        loaded = datasets.load_from_disk(str(tmp_path / "saved"))[split]
        assert [list(sample.messages) for sample in read] == list(loaded["messages"])  # type: ignore[index]


@pytest.mark.parametrize(
    ("files", "readme", "expected"),
    [
        (
            [
                "data/train-00000-of-00002.parquet",
                "data/train-00001-of-00002.parquet",
                "data/test-00000-of-00001.parquet",
            ],
            "",
            {"train": 2, "test": 1},
        ),
        (["train.parquet", "valid.parquet"], "", {"train": 1, "validation": 1}),
        (["a/train/0.parquet", "a/dev/0.parquet", "extra.parquet"], "", {"train": 1, "validation": 1}),
        (["one.parquet", "two.parquet"], "", {"train": 2}),
        (["x.parquet", "y.parquet"], "- config_name: default\n  data_files: x.parquet\n", {"train": 1}),
        (
            ["d/a.parquet", "d/b.parquet"],
            "- config_name: a\n  data_files:\n  - split: train\n    path: d/a*\n"
            "  - split: validation\n    path: [d/b.parquet]\n",
            {"train": 1, "validation": 1},
        ),
    ],
    ids=range(6),
)
def test_splits_of_hub_datasets(files, readme, expected, tmp_path):
    hub(tmp_path, *files, readme=readme)
    assert {split: len(members) for split, members in names(tmp_path).items()} == expected


TWO = "- config_name: one\n  data_files: a.parquet\n- config_name: two\n  data_files: b.parquet\n"
WRONG = {
    "nothing": (lambda folder: None, "is not a dataset: it has no file with suffix .jsonl"),
    "model": (lambda folder: (folder / "config.json").write_text("{}"), "is a model"),
    "shard": (lambda folder: hub(folder, "train-00000-of-00003.parquet"), "1 of 3 files train-"),
    "configurations": (
        lambda folder: hub(folder, "a.parquet", "b.parquet", readme=TWO),
        "has 2 configurations: one, tw",
    ),
    "readme": (
        lambda folder: hub(folder, "a.parquet", readme="- config_name: default\n  data_files: gone*\n"),
        "has no file gone",
    ),
    "no train": (
        lambda folder: hub(folder, "test.parquet", "validation.parquet"),
        "has no split train, only validation, test",
    ),
    "two forms": (
        lambda folder: [hub(folder, "train.parquet"), (folder / "train.jsonl").write_text("")],
        "has train in several formats, lines and parquet",
    ),
    "lost": (lambda folder: [saved(folder / "d"), (folder / "d/data-00001-of-00002.arrow").unlink()], "is missing"),
    "state": (lambda folder: [saved(folder / "d"), (folder / "d/state.json").write_text("{")], "is not JSON"),
    "escape": (
        lambda folder: [
            saved(folder / "d"),
            (folder / "d/state.json").write_text('{"_data_files": [{"filename": "../x"}]}'),
        ],
        "which is not a file inside it",
    ),
    "splits": (
        lambda folder: [several(folder, "train"), (folder / "dataset_dict.json").write_text("[]")],
        "is not a JS",
    ),
    "loop": (lambda folder: os.symlink(folder, folder / "loop"), "is not a dataset"),
}


@pytest.mark.parametrize("what", WRONG)
def test_refuses_other_folders(what, tmp_path):
    write, says = WRONG[what]
    write(tmp_path)
    folder = tmp_path / "d" if (tmp_path / "d").is_dir() else tmp_path
    with pytest.raises(UserError, match=says) as refused:
        packed_data.check_data(DataOptions((str(folder),)))
    assert refused.value.hint
