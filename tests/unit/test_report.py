"""The comparison and what a finished study shows, on invented studies."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pandas as pd
import pytest

from lengthwise.experiments.comparison import compare, merge_marks, paired, rates_apart
from lengthwise.experiments.figures.contract import canned_study
from lengthwise.experiments.figures.quickstart import relative
from lengthwise.experiments.load_runs import load_requests, load_runs, read_cells
from lengthwise.experiments.report import finish, waiting
from lengthwise.experiments.table import WIDTH, markdown, number, page
from lengthwise.experiments.table_tails import by_mean

SMALL = {"loads": (0.9, 1.2), "num_requests": 40}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "study"
    return folder, canned_study(folder, **SMALL)


@pytest.fixture
def study(whole, tmp_path):
    """A private copy of a small study: its folder and manifest rows."""
    folder, rows = whole
    return shutil.copytree(folder, tmp_path / "study"), [dict(row) for row in rows]


def text_of(lines):
    return "\n".join("".join(text for text, _ in line) for line in lines)


def edit(folder, change):
    summary = json.loads((folder / "summary.json").read_text())
    change(summary)
    (folder / "summary.json").write_text(json.dumps(summary))


def test_n6_percentiles_are_of_the_pooled_requests(study):
    """Case N6: two shards, 99 x 1 s + 1 x 100 s and 100 x 1 s; the P99 of the 200 is 1 s, the mean of the P99s is not."""
    folder, _ = study
    cells = [cell for cell in read_cells(folder) if cell.fields["policy"] == "fcfs" and cell.fields["load"] == 0.9]
    cells = [cell for cell in cells if cell.fields["arrivals"] == "poisson"][:2]
    for k, cell in enumerate(cells):
        requests = pd.read_parquet(cell.folder / "requests.parquet").iloc[[0] * 100].reset_index(drop=True)
        latency = np.ones(100)
        latency[0] = 100.0 if k == 0 else 1.0
        requests["finish"] = requests["ended"] = requests["arrival"] + latency
        requests.to_parquet(cell.folder / "requests.parquet", index=False)
        edit(cell.folder, lambda s: s["metrics"].update(num_counted=100))
    row = compare(cells).iloc[0]
    assert row["e2e_p99"] == pytest.approx(1.0)
    assert row["e2e_mean"] == pytest.approx((199 + 100) / 200)


def test_of_fcfs_alone_there_is_a_table_and_no_quickstart_figure(study, capsys):
    folder, rows = study
    alone = [row for row in rows if row["fields"]["policy"] == "fcfs"]
    finish(folder, alone, {"name": "alone", "wandb": "off"})
    text = capsys.readouterr()
    assert "no figure quickstart: no other schedule was run beside FCFS" in " ".join((text.out + text.err).split())
    assert (folder / "table.csv").exists() and not list(folder.glob("quickstart*"))


def test_a_setting_without_fcfs_is_in_no_quickstart_figure(study):
    """Nothing there can be held against FCFS; the table has it all the same."""
    runs = load_runs(study[0])
    names = sorted(set(runs["arrivals"]))
    alone = runs[(runs["policy"] != "fcfs") | (runs["arrivals"] == names[0])]
    table = relative(alone)
    assert len(names) == 2 and table["setting_name"].nunique() == 1 and names[0] in table["setting_name"].iloc[0]
    assert table["ratio"].notna().all() and relative(runs)["setting_name"].nunique() == 2


def test_only_requests_in_the_window_count(study):
    folder, _ = study
    cell = read_cells(folder)[0]
    arrival = pd.read_parquet(cell.folder / "requests.parquet")["arrival"].to_numpy()
    edit(cell.folder, lambda s: s["window"].update(begin=float(arrival[10]), end=float(arrival[30]), whole=False))
    requests = load_requests([cell.folder])
    assert requests["counted"].sum() == 20
    row = compare(read_cells([cell.folder])).iloc[0]
    assert row["e2e_mean"] == pytest.approx(requests["e2e"][requests["counted"]].mean())
    assert (
        row["wait_mean"] == pytest.approx(requests["wait"][requests["counted"]].mean()) and row["wait_mean"] <= row["max_wait"]
    )


def test_unfinished_requests_take_the_mean_away_and_bound_the_tail(study):
    folder, _ = study
    cell = read_cells(folder)[0]
    requests = pd.read_parquet(cell.folder / "requests.parquet")
    late = requests["arrival"].nsmallest(5).index
    requests.loc[late, ["finish", "ended"]] = np.nan
    requests.loc[late, "status"] = "unfinished"
    requests = pd.concat([requests] * 5, ignore_index=True)
    requests.to_parquet(cell.folder / "requests.parquet", index=False)
    end = float(requests["arrival"].max() + 500)
    edit(cell.folder, lambda s: (s["window"].update(run_end=end), s["metrics"].update(num_unfinished=25)))
    row = compare(read_cells([cell.folder])).iloc[0]
    assert np.isnan(row["e2e_mean"]) and row["e2e_p99_open"] and row["e2e_p99"] >= 500
    text = text_of(page(compare(read_cells([cell.folder]))))
    assert "unfinished: no mean" in text and ">" in text


def test_below_load_one_what_the_end_of_the_arrivals_did_is_told(study):
    """And so is the load that the arrivals achieved: 0.9 was asked, 0.81 to 1.08 came."""
    folder, _ = study
    cells = [cell for cell in read_cells(folder) if cell.fields["policy"] == "fcfs" and cell.fields["arrivals"] == "gamma"]
    for cell in cells:
        share, rate = (0.3, 1.2) if cell.fields["seed"] == 1 else (0.0, 0.9)
        own = {"num_after_arrivals": 4, "after_arrivals_share": share, "arrival_rps": rate * cell.fields["rate"]}
        edit(cell.folder, lambda s, own=own: s["metrics"].update(own))
    table = compare(read_cells([cell.folder for cell in cells]))
    row = table[table["load"] == 0.9].iloc[0]
    assert (row["load_least"], row["load_greatest"]) == pytest.approx((0.81, 1.08)) and row["num_after_arrivals"] == 12
    text = text_of(page(table))
    assert "load 0.9 (achieved 0.81 to 1.08)" in text and "load 1.2 (achieved 1.08 to 1.44)" in text
    assert text.count("in one seed 30% of its E2E") == 1  # told once, at load 0.9


def test_differences_are_paired_by_seed(study):
    folder, _ = study
    runs = load_runs(folder)
    table = paired(runs)
    pick = (
        (table["arrivals"] == "gamma") & (table["load"] == 0.9) & (table["policy"] == "srpt") & (table["predictor"] == "gbdt")
    )
    row = table[pick].iloc[0]
    same = runs[(runs["arrivals"] == "gamma") & (runs["load"] == 0.9)].set_index("seed")
    own = same[(same["policy"] == "srpt") & (same["predictor"] == "gbdt")]["e2e_mean"]
    d = (own - same[same["policy"] == "fcfs"]["e2e_mean"]).to_numpy()
    assert row["difference"] == pytest.approx(d.mean())
    half = 4.302653 * d.std(ddof=1) / np.sqrt(3)
    assert (row["difference_low"], row["difference_high"]) == pytest.approx((d.mean() - half, d.mean() + half), rel=1e-5)
    assert row["difference_seeds"] == 3 and row["ratio_low"] < row["ratio"] < row["ratio_high"] < 1


def test_the_gap_is_not_told_where_there_is_none(study):
    table = compare(read_cells(study[0]))
    notes = table[table["policy"] != "fcfs"].groupby("arrivals", sort=False)["gap_note"].agg(set)
    assert notes["poisson"] == {"n/a"} and notes["gamma"] == {""}
    oracle = table[(table["arrivals"] == "gamma") & (table["predictor"] == "oracle")]
    assert np.allclose(oracle["gap_closed"], 1.0)


def test_n4_a_missing_seed_is_counted_and_not_filled_in(study):
    """Case N4: 3 seeds of which one failed: n = 2, and the seed is named."""
    folder, rows = study
    bad = next(r for r in rows if r["fields"]["policy"] == "srpt" and r["fields"]["seed"] == 1)
    bad["status"] = "failed"
    table = compare(read_cells(folder, rows))
    row = table[(table["policy"] == "srpt")].iloc[0]
    assert (row["num_seeds"], row["num_cells"], row["absent"], row["difference_seeds"]) == (2, 3, "1: failed", 2)
    assert "2 of 3 seeds (seed 1: failed)" in text_of(page(table))


def test_n2_a_row_without_any_cell_stays_as_a_gap(study):
    folder, rows = study
    for row in rows:
        if row["fields"]["predictor"] == "gbdt" and row["fields"]["load"] == 0.9:
            shutil.rmtree(folder / row["folder"])
    table = compare(read_cells(folder))
    gap = table[(table["predictor"] == "gbdt") & (table["load"] == 0.9)]
    assert len(gap) == 4 and gap["e2e_mean"].isna().all() and gap["difference"].isna().all()
    assert len(table) == 36


def test_the_manifest_decides_what_belongs(study):
    folder, rows = study
    stale = folder / "left-over"
    shutil.copytree(folder / rows[0]["folder"], stale)
    assert len(load_runs(folder)) == len(rows)
    edit(folder / rows[3]["folder"], lambda s: s["provenance"].update(config_hash="of another config"))
    runs = load_runs(folder)
    assert runs["status"].tolist().count("stale") == 1 and np.isnan(runs["e2e_mean"].iloc[3])
    (folder / "cells.jsonl").unlink()
    assert len(load_runs(folder)) == len(rows) + 1


def test_reading_nothing_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        load_runs(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no cell"):
        load_runs(tmp_path)
    with pytest.raises(ValueError, match="empty list"):
        load_runs([])


def test_variants_of_a_schedule_are_not_pooled(study):
    folder, rows = study
    for row in rows:
        batching = "mixed" if row["fields"]["seed"] == 2 else "chunked"
        edit(folder / row["folder"], lambda s, b=batching: s["cell"].update(batching=b))
    table = compare(read_cells(folder))
    assert len(table) == 72 and set(table["variant"]) == {"chunked", "mixed"}
    chunked = table[(table["policy"] == "srpt") & (table["variant"] == "chunked")]
    assert (chunked["difference_seeds"] == 2).all()  # against FCFS with the same batching


def test_finish_writes_everything_and_the_same_bytes_twice(study, capsys):
    folder, rows = study
    names = ("table.csv", "table.md", "study.json", "quickstart.pdf", "quickstart.png", "quickstart.csv")
    finish(folder, rows, {"name": "invented", "wandb": "off"})
    first = {name: (folder / name).read_bytes() for name in names}
    out = capsys.readouterr().out
    finish(folder, rows, {"name": "invented", "wandb": "off"})
    assert {name: (folder / name).read_bytes() for name in names} == first
    assert "invented: 108 of 108 cells" in out and "hardware: name: invented" in out
    assert max(map(len, out.splitlines())) <= WIDTH
    record = json.loads(first["study.json"])
    assert record["num_complete"] == 108 and len(record["table"]) == 36 and record["seeds"] == [0, 1, 2]
    assert record["provenance"]["hardware"][0]["validated"] == "made-up numbers"
    assert str(folder) not in first["study.json"].decode() + first["table.md"].decode()


def test_n2_finish_with_failed_cells_says_how_many(study, capsys):
    folder, rows = study
    rows[5]["status"] = "failed"
    shutil.rmtree(folder / rows[8]["folder"])
    finish(folder, rows, {"name": "invented", "wandb": "off"})
    out = capsys.readouterr().out
    assert "invented: 106 of 108 cells" in out and f"failed: {rows[5]['cell']}" in out and f"missing: {rows[8]['cell']}" in out
    assert json.loads((folder / "study.json").read_text())["num_complete"] == 106


def test_finish_refuses_an_unknown_mirror(study):
    with pytest.raises(ValueError, match="wandb='on'"):
        finish(study[0], study[1], {"wandb": "on"})


def test_marks_overload_and_oracles_are_told(study):
    folder, rows = study
    marked = next(r for r in rows if r["fields"]["predictor"] == "gbdt")
    edit(folder / marked["folder"], lambda s: s["provenance"].update(marks=["predictor transferred"]))
    text = text_of(page(compare(read_cells(folder))))
    assert "sjf gbdt: predictor transferred" in text and "oracle*" in text
    assert "OVERLOAD, a matter of the horizon: N / rate = 2 s" in text  # 40 / (1.2 x 20)
    assert "~" in text  # a P99 of 120 requests


def test_regret_is_to_the_same_policy_with_the_oracle_paired_by_seed(study):
    """Against E2E means put by hand: seeds 0, 1, 2 with 2, 3, 4 s and the oracle 1, 2, 4 s: exp(mean of log ratios) - 1."""
    folder, rows = study
    own, oracle = ({0: 2.0, 1: 3.0, 2: 4.0}, {0: 1.0, 1: 2.0, 2: 4.0})
    for row in rows:
        fields = row["fields"]
        if (fields["policy"], fields["load"], fields["arrivals"]) == ("srpt", 0.9, "gamma"):
            mean = (own if fields["predictor"] == "gbdt" else oracle)[fields["seed"]]
            edit(folder / row["folder"], lambda s, mean=mean: s["metrics"].update(e2e_mean=mean))
    table = compare(read_cells(folder))
    at = table[(table["policy"] == "srpt") & (table["load"] == 0.9) & (table["arrivals"] == "gamma")].set_index("predictor")
    logs = np.log([2.0, 1.5, 1.0])
    half = 4.302653 * logs.std(ddof=1) / np.sqrt(3)
    row = at.loc["gbdt"]
    assert row["regret"] == pytest.approx(np.expm1(logs.mean()))
    assert (row["regret_low"], row["regret_high"]) == pytest.approx(
        (np.expm1(logs.mean() - half), np.expm1(logs.mean() + half)), rel=1e-5
    )
    assert np.isnan(at.loc["oracle", "regret"]) and table[table["policy"] == "fcfs"]["regret"].isna().all()


def test_what_the_cells_measured_is_joined_over_seeds(study):
    """Means over seeds, the greatest of overtaking, preemptions over all requests, CPU over plans; none where one lacks it."""
    folder, rows = study
    wanted = {"policy": "fcfs", "load": 0.9, "arrivals": "gamma"}
    cells = [row for row in rows if wanted.items() <= row["fields"].items()]
    for k, row in enumerate(cells):
        own = {
            "jain": 0.9 - 0.1 * k,
            "overtaking_max": 5 + k,
            "preemptions": 10 * k,
            "recompute_tax": 0.1 * k,
            "kv_use_mean": 0.5,
        }
        edit(
            folder / row["folder"], lambda s, own=own, k=k: (s["metrics"].update(own), s["volatile"].update(simulate_cpu=k + 1))
        )
    found = compare(read_cells(folder))
    row = found[(found["policy"] == "fcfs") & (found["load"] == 0.9) & (found["arrivals"] == "gamma")].iloc[0]
    assert row["jain"] == pytest.approx(0.8) and row["overtaking_max"] == 7 and row["kv_use_mean"] == 0.5
    assert row["recompute_tax"] == pytest.approx(0.1) and row["preemptions_per_request"] == pytest.approx(30 / 120)
    assert row["overhead_us"] == pytest.approx(2 / 40 * 1e6)  # 40 plans a cell
    edit(folder / cells[0]["folder"], lambda s: s["metrics"].update(jain=None))
    found = compare(read_cells(folder))
    row = found[(found["policy"] == "fcfs") & (found["load"] == 0.9) & (found["arrivals"] == "gamma")].iloc[0]
    assert np.isnan(row["jain"]) and not np.isnan(row["kv_use_mean"])


def test_a_long_table_is_sorted_and_says_more(study, capsys):
    folder, rows = study
    figures = {"wait_ccdf": {"only": {"policy": ["fcfs", "srpt"]}}, "tails": {"latency": "wait"}}
    cfg = {"name": "invented", "wandb": "off", "table": "long", "figures": figures}
    finish(folder, rows, cfg)
    out = capsys.readouterr().out
    assert "overhead.csv" in out and "wait_ccdf.csv" in out and "tails.csv" in out and max(map(len, out.splitlines())) <= WIDTH
    assert "slowdown" in out and "passed by" in out and "regret (%)" in out
    table = pd.read_csv(folder / "table.csv")
    assert "overhead_us" not in table and "e2e_p999" in table and {"wait_p99", "jain", "slowdown_d10_mean"} <= set(table)
    for _, block in table.groupby(["setting_name", "load"], sort=False):
        assert block["e2e_mean"].is_monotonic_increasing and len(block) == 9
    assert (folder / "table.md").read_text().count("| schedule") == 8  # two pages of four blocks
    assert set(pd.read_csv(folder / "wait_ccdf.csv")["policy"]) == {"fcfs", "srpt"}
    assert set(pd.read_csv(folder / "tails.csv")["policy"]) == {"fcfs", "sjf", "srpt"}


def test_a_page_of_many_rows_shows_the_first_the_best_oracle_and_fcfs(study):
    table = by_mean(compare(read_cells(study[0])))
    text = text_of(page(table, most=2)).splitlines()
    assert sum("more, see table.md" in line for line in text) == 4
    blocks = "\n".join(text).split("more, see table.md")[:4]
    for block, (_, rows) in zip(blocks, table.groupby(["setting_name", "load"], sort=False), strict=True):
        shown = [line.split()[:2] for line in block.splitlines() if line.startswith(("fcfs ", "sjf ", "srpt "))]
        names = list(zip(rows["policy"], rows["predictor"] + np.where(rows["is_oracle"], "*", ""), strict=True))
        best = [list(name) for name in names if name[1] != "oracle*"][:2]
        assert all(name in shown for name in (*best, ["fcfs", "none"])) and len(shown) <= 4
        assert [name for name in shown if name[1] == "oracle*"] == [[next(n for n, p in names if p == "oracle*"), "oracle*"]]
    assert by_mean(table.assign(e2e_mean=np.nan))["e2e_mean"].isna().all()


def test_marks_of_one_kind_are_told_once_with_their_range():
    found = merge_marks(["3.1% of the busy time outside", "transferred", "1.2% of the busy time outside", "transferred"])
    assert found == ["1.2 to 3.1% of the busy time outside", "transferred"]
    assert merge_marks([*found, "7% of the busy time outside"])[0] == "1.2 to 7% of the busy time outside"


def test_markdown_has_a_table_per_block_with_equal_columns(study):
    lines = markdown(compare(read_cells(study[0]))).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1
    assert sum(line.startswith("| schedule") for line in rows) == 4 and len(rows) == 4 * (9 + 2)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (0.0004, "0"), (0.0234, "0.023"), (0.234, "0.23"), (1.234, "1.23"), (9.999, "10.0"), (12.34, "12.3"),
        (-123.4, "-123"), (1234.5, "1234"), (123_456.0, "123k"), (float("nan"), "-"),
    ],
)  # fmt: skip
def test_numbers_are_short(value, text):
    assert number(value) == text and len(text) <= 6


# --- rates instead of loads ---------------------------------------------------------------------------------------------


def without_loads(folder):
    """The stored study as if its cells had been given rates."""
    for path in folder.glob("*/summary.json"):
        summary = json.loads(path.read_text())
        summary["cell"]["load"] = None
        path.write_text(json.dumps(summary))
    rows = [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]
    for row in rows:
        row["fields"]["load"] = None
    (folder / "cells.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_cells_that_were_given_rates_are_compared_rate_by_rate(tmp_path):
    """Never a mean over rates, nor one rate's cells for all."""
    canned_study(tmp_path, num_requests=120, loads=(0.8, 0.95), seeds=(0, 1))
    want = compare(read_cells(tmp_path))
    without_loads(tmp_path)
    found = compare(read_cells(tmp_path))
    assert found["load"].isna().all() and found["rate"].nunique() == 4
    same = [key for key in want if key not in ("load", "load_least", "load_greatest", "after_arrivals_share")]
    pd.testing.assert_frame_equal(found[same], want[same])
    text = "\n".join("".join(part for part, _ in line) for line in page(found))
    assert text.count("2 seeds x 120 requests") == 4 and "  |  16.0 requests/s" in text and "  |  19.0 requests/s" in text
    assert sum("16 requests/s" in line and "19 requests/s" in line for line in waiting(found.assign(wait_share=0.5))) == 1


def test_a_missing_cell_of_a_replay_stands_with_the_others():
    """Nobody knows its rate, the trace's own, before it has run; there is one."""
    frame = pd.DataFrame({"workload": ["a", "a", "b", "b"], "load": [None] * 4, "rate": [3.0, None, 1.0, 2.0]})
    assert rates_apart(frame).tolist() == [3.0, 3.0, 1.0, 2.0]
    frame = pd.DataFrame({"workload": ["b", "b", "b"], "load": [None, None, 0.8], "rate": [1.0, None, 2.0]})
    assert rates_apart(frame).fillna(-1).tolist() == [1.0, 1.0, -1.0]
    assert rates_apart(frame.assign(rate=[1.0, None, 2.0], load=None)).fillna(-1).tolist() == [1.0, -1.0, 2.0]
