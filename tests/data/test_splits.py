"""Folders of data as published ones are laid out: which files a split has, and what is said where there is none."""

import pyarrow
import pyarrow.parquet
import pytest

from specrl_jax.data.files import read_rows
from specrl_jax.data.schemas import PLAIN, detect_schema
from specrl_jax.data.splits import data_files, own_validation
from specrl_jax.errors import InputError


@pytest.fixture
def folder(tmp_path):
    """make(names...) -> a folder with those files, each of one row that holds its name."""

    def make(*names):
        for name in names:
            path = tmp_path / "set" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".parquet"):
                pyarrow.parquet.write_table(pyarrow.table({"prompt": [name], "answer": ["1"]}), path)
            else:
                path.write_text(f'{{"prompt": "{name}", "answer": "1"}}\n')
        return tmp_path / "set"

    return make


@pytest.mark.parametrize(
    ("names", "train", "evaluated"),
    [
        # The hub's layouts: shards, with and without data/; a configuration; the converted branch; plain files.
        (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"],
         ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
         ["data/test-00000-of-00001.parquet"]),
        (["main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"],
         ["main/train-00000-of-00001.parquet"], ["main/test-00000-of-00001.parquet"]),
        (["default/train/0000.parquet", "default/train/0001.parquet", "default/validation/0000.parquet"],
         ["default/train/0000.parquet", "default/train/0001.parquet"], ["default/validation/0000.parquet"]),
        (["gsm8k_train.jsonl", "gsm8k_dev.jsonl", "gsm8k_test.jsonl"], ["gsm8k_train.jsonl"], ["gsm8k_dev.jsonl"]),
        (["dataset_infos.json", "train.jsonl", "test.jsonl"], ["train.jsonl"], ["test.jsonl"]),
        (["a.jsonl", "b.jsonl"], ["a.jsonl", "b.jsonl"], []),
    ],
    ids=lambda names: names[0] if names else "-",
)  # fmt: skip
def test_the_files_of_a_folder(folder, names, train, evaluated):
    path = folder(*names)
    assert data_files(str(path), "data.path") == [str(path / name) for name in train]
    assert [row.content["prompt"] for row in read_rows(str(path), "data.path")] == train
    if evaluated:
        assert data_files(str(path), "eval.path") == [str(path / name) for name in evaluated]
        assert data_files(own_validation(str(path)), "eval.path") == [str(path / name) for name in evaluated]
    else:
        assert own_validation(str(path)) == ""


def test_a_split_by_its_name(folder):
    path = folder("train_sft-00000-of-00001.parquet", "test_sft-00000-of-00001.parquet")
    assert data_files(f"{path}:test_sft", "eval.path") == [str(path / "test_sft-00000-of-00001.parquet")]
    with pytest.raises(InputError, match=r"has no split train; there are test_sft, train_sft: .*:SPLIT names one"):
        data_files(str(path), "data.path")
    with pytest.raises(InputError, match="has no split 'val'"):
        data_files(f"{path}:val", "data.path")


def test_what_is_no_data_set_is_named(folder, tmp_path):
    several = folder("main/train.jsonl", "socratic/train.jsonl")
    with pytest.raises(InputError, match=r"several data sets; name one: .*set/main or .*set/socratic"):
        data_files(str(several), "data.path")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"data.path: '.*empty' holds no files \*.parquet"):
        data_files(str(tmp_path / "empty"), "data.path")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("openai/gsm8k", "hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k`, and name data/gsm8k"),
        ("data/train.jsonl", "data.path: no file 'data/train.jsonl'"),
        ("tests/nothing", "data.path: no file 'tests/nothing'"),
    ],
)
def test_the_id_of_a_data_set_is_answered_with_its_download(path, said):
    with pytest.raises(InputError) as refused:
        data_files(path, "data.path")
    assert str(refused.value).endswith(said)


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ('{"prompt": "1+1", "answer": "2"}', PLAIN),
        ('{"question": "1+1", "answer": "so\\n#### 2"}', "gsm8k"),
        ('{"question": "1+1", "answer": "2"}', "question"),
        ('{"problem": "1+1", "answer": 2, "solution": "so"}', "math"),
        ('{"prompt": [{"role": "user", "content": "1+1"}], "label": "2"}', "dapo"),
        ('{"prompt": "1+1", "reward_model": {"ground_truth": "2"}}', "verl"),
    ],
)
def test_the_schema_of_the_first_row(tmp_path, row, name):
    (tmp_path / "a.jsonl").write_text(row + "\n")
    assert detect_schema(str(tmp_path / "a.jsonl"), "data.path") == name


def test_columns_of_no_schema_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input": "1+1", "output": "2"}\n')
    with pytest.raises(InputError, match=r"a.jsonl:1: .* there are input, output; .*data.schema=PROMPT:ANSWER"):
        detect_schema(str(tmp_path / "a.jsonl"), "data.path")
