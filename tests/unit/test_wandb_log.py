"""W&B's offline files are read back whole, without a network; what is cut off or damaged is told (cases N1, X7).

The files are written by the installed W&B itself, so a version that changes its format or its records fails here.
"""

from __future__ import annotations

import os
import shutil

import pytest
import wandb

from lengthwise.experiments.wandb_log import BLOCK, IDENT, PIECE, RUN_COLUMNS, read_offline, read_segment
from lengthwise.experiments.wandb_session import contained, open_run, whole_run, why_broken

RARE = range(0, 2000, 77)  # 26 of 2,000 rows


def write(folder, run_id, rows, **facts):
    """An offline run in folder/wandb, by W&B. Returns its file."""
    where = folder / "wandb"
    where.mkdir(parents=True, exist_ok=True)
    with contained(where, "offline") as module, open_run(module, where, run_id, "offline", project="p", **facts) as run:
        for step, row in rows:
            run.log(row, step=step)
    return max(where.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"), key=lambda path: path.parent.name)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        del os.environ[name]
    folder = tmp_path_factory.mktemp("log")
    rows = [(step, {"loss": step / 7, **({"rare": step} if step in RARE else {})}) for step in range(2000)]
    rows.append((2000, {"text": "x" * (2 * BLOCK), "nested": {"a": {"b": 1}}, "nan": float("nan"), "flag": True}))
    facts = {"config": {"x": {"y": [1, {"z": None}]}, "n": 3}, "tags": ["a", "b"], "group": "g", "job_type": "j", "name": "n"}
    path = write(folder, "one", rows, **facts)
    assert why_broken(path.parent, 2001, 10.0) is None
    return folder, path


def test_n1_every_row_comes_back_and_none_is_sampled(written):
    """Case N1: a run of 2,000 rows, one key in 26 of them."""
    runs, history = read_offline(written[0])
    assert runs["num_rows"].tolist() == [2001] and len(history) == 2001 and history["loss"].notna().sum() == 2000
    assert history["rare"].notna().sum() == len(RARE) == 26
    assert history["rare"].dropna().tolist() == list(RARE)
    assert history["step"].tolist() == list(range(2001)) and history["loss"][:2000].tolist() == [k / 7 for k in range(2000)]
    again = read_offline(written[1].parent)  # the same each time, from the run's own folder too
    assert again[1].equals(history)


def test_what_a_run_says_of_itself_comes_back(written):
    runs, history = read_offline(written[0] / "wandb")
    assert list(runs) == list(RUN_COLUMNS)
    run = runs.iloc[0]
    assert (run["id"], run["name"], run["group"], run["job_type"], run["project"]) == ("one", "n", "g", "j", "p")
    assert run["tags"] == ["a", "b"] and run["config"] == {"x": {"y": [1, {"z": None}]}, "n": 3}
    assert run["ended"] and run["problem"] is None and run["summary"]["rare"] == 1925
    last = history.iloc[-1]
    assert len(last["text"]) == 2 * BLOCK and last["flag"] is True  # a record that spans three blocks
    assert last["nested.a.b"] == 1 and run["summary"]["nested"] == {"a": {"b": 1}}


def record_ends(raw):
    """Where the records of a whole log end; their lengths depend on the time of day that W&B puts into them."""
    at = len(IDENT)
    while at + PIECE.size <= len(raw):
        room = BLOCK - at % BLOCK
        if room < PIECE.size:
            at += room
            continue
        _, size, kind = PIECE.unpack_from(raw, at)
        at += PIECE.size + size
        if kind in (1, 4):
            yield at


def test_a_file_that_is_cut_between_two_records_never_ended(written, tmp_path):
    path = tmp_path / "run-one.wandb"
    raw = written[1].read_bytes()
    ends = list(record_ends(raw))
    assert len(ends) > 2000
    for left in (*ends[:3], ends[-2]):
        path.write_bytes(raw[:left])
        assert "the run never ended" in read_segment(path).problem


@pytest.mark.parametrize("left", [3, 7, 9, 5_000, BLOCK - 2, BLOCK + 3, 100_001])
def test_x7_a_truncated_file_gives_what_is_whole_and_says_so(written, tmp_path, left):
    path = tmp_path / "run-one.wandb"
    raw = written[1].read_bytes()
    path.write_bytes(raw[:left])
    segment = read_segment(path)
    assert segment.problem and not segment.ended
    whole = read_segment(written[1]).rows
    assert segment.rows == whole[: len(segment.rows)] and len(segment.rows) < 2001
    assert (len(segment.rows) > 0) == (left >= 5_000)
    if left > 9:
        whole_until = max([end for end in record_ends(raw) if end <= left], default=len(IDENT))
        between = not any(raw[whole_until:left])  # as chance wants it, just there, or on zeros that fill a block up
        told = "the run never ended" if between else f"its last {left - whole_until} of {left} bytes are no whole record"
        assert told in segment.problem


def test_zeros_after_a_whole_record_are_no_damage(written, tmp_path):
    """A file system may give a file its length before its bytes."""
    path = tmp_path / "run-one.wandb"
    path.write_bytes(written[1].read_bytes() + bytes(5))
    assert read_segment(path).problem is None and len(read_segment(path).rows) == 2001


@pytest.mark.parametrize("at", [len(IDENT), len(IDENT) + 3, 40_000, 90_000])
def test_a_damaged_byte_is_found_by_its_checksum(written, tmp_path, at):
    raw = bytearray(written[1].read_bytes())
    raw[at] ^= 0x10
    path = tmp_path / "run-one.wandb"
    path.write_bytes(raw)
    segment = read_segment(path)
    assert "damaged at byte" in segment.problem and not segment.ended
    assert segment.rows == read_segment(written[1]).rows[: len(segment.rows)] and len(segment.rows) < 2001


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "run-x.wandb"
    path.write_bytes(b"PAR1 and more")
    with pytest.raises(ValueError, match="no W&B log that is known here"):
        read_segment(path)
    with pytest.raises(ValueError, match="no offline W&B run under"):
        read_offline(tmp_path / "nothing")


def test_a_record_that_is_no_record_is_refused(tmp_path):
    import zlib

    data = b"\xff\xff\xff"
    path = tmp_path / "run-x.wandb"
    path.write_bytes(IDENT + PIECE.pack(zlib.crc32(data, zlib.crc32(b"\x01")), len(data), 1) + data)
    with pytest.raises(ValueError, match="this version of W&B cannot read"):
        read_segment(path)


def test_x7_pieces_of_one_run_are_one_run_with_ordered_steps(tmp_path):
    """Case X7 on W&B's own files: steps 0-9, a kill, steps 10-19 in a new file: 20 steps, once each, however often read."""
    first = write(tmp_path, "r", [(k, {"v": k}) for k in range(10)], name="run")
    assert why_broken(first.parent, 10, 10.0) is None
    raw = first.read_bytes()
    first.write_bytes(raw[:-3])  # the kill: all rows are there, its end is not
    older = tmp_path / "wandb" / "offline-run-20000101_000000-r"
    first.parent.rename(older)
    second = write(tmp_path, "r", [(k, {"v": k}) for k in range(10, 20)], name="run")
    assert why_broken(second.parent, 10, 10.0) is None
    for _ in range(2):
        runs, history = read_offline(tmp_path)
        assert runs["num_segments"].tolist() == [2] and runs["num_rows"].tolist() == [20] and runs["ended"].tolist() == [True]
        assert history["step"].tolist() == list(range(20)) == history["v"].tolist()
    assert "run-r.wandb" in runs["problem"][0]  # that the first piece was cut off is told
    shutil.copytree(second.parent, tmp_path / "wandb" / "offline-run-99990101_000000-r")  # a copy synced again
    runs, history = read_offline(tmp_path)
    assert history["v"].tolist() == list(range(20)) and "10 steps were logged twice" in runs["problem"][0]


def test_a_whole_run_is_kept_and_a_broken_one_removed(tmp_path):
    path = write(tmp_path, "r", [(0, {"v": 1})])
    assert why_broken(path.parent, 1, 10.0) is None and "2 were logged" in why_broken(path.parent, 2)
    torn = tmp_path / "wandb" / "offline-run-20000101_000000-r"
    shutil.copytree(path.parent, torn)
    (torn / path.name).write_bytes(path.read_bytes()[:-50])
    assert whole_run(tmp_path / "wandb", "r") == path.parent and not torn.exists() and path.exists()


def test_the_installed_wandb_has_the_records_that_are_read():
    from wandb.proto.wandb_internal_pb2 import Record

    wanted = {
        "run": {"run_id", "display_name", "run_group", "job_type", "tags", "project", "config"},
        "config": {"update", "remove"}, "summary": {"update", "remove"}, "history": {"item"},
        "artifact": {"name", "type", "metadata", "manifest"}, "exit": set(),
    }  # fmt: skip
    for kind, names in wanted.items():
        assert names <= {field.name for field in getattr(Record(), kind).DESCRIPTOR.fields}, (wandb.__version__, kind)
