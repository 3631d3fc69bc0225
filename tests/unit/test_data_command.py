"""`lengthwise data`: every node is listed with where its file is had; what is found is checked; fetching fails in one line."""

from __future__ import annotations

import gzip
import hashlib
import re
import socket
from pathlib import Path
from typing import Any

import pooch
import pytest
import requests

from lengthwise import cli
from lengthwise.experiments import catalogue, fetching
from lengthwise.experiments.catalogue import entries, files_of, nodes, origins, status
from lengthwise.experiments.workloads import azure
from lengthwise.experiments.workloads.origin import File, Origin, found, sha256

TEXT = b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,48,10\r\n2023-11-16 18:17:05.9799600,48,12\r\n"
SHA = hashlib.sha256(TEXT).hexdigest()
NAME = "AzureLLMInferenceTrace_code.csv"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder, and no other file in reach."""
    monkeypatch.setenv("LENGTHWISE_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Origin:
    """azure_code, its recorded checksum being that of TEXT."""
    real = azure.ORIGINS["azure_code"]
    origin = Origin(real.what, real.project, real.page, real.licence, (File(NAME, SHA, len(TEXT), real.files[0].url),))
    monkeypatch.setitem(azure.ORIGINS, "azure_code", origin)
    return origin


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = cli.main(["data", *args])
    said = capsys.readouterr()
    return code, said.out, said.err


# --- what is known ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_each_says_where_it_is_had(entry: catalogue.Entry) -> None:
    origin = entry.origin
    assert origin.what and origin.project and origin.licence and origin.files
    assert origin.page.startswith("https://") or origin.package
    assert origin.how or any(file.url for file in origin.files), "neither an address nor a way to make it"
    for file in origin.files:
        assert file.sha256 is None or re.fullmatch("[0-9a-f]{64}", file.sha256)
        assert (file.sha256 is None) == (file.size is None)
        assert file.url is None or (file.url.startswith("https://") and file.url.endswith(file.name))
        if file.url and "github.com" in file.url and file.sha256:
            assert re.search("/raw/[0-9a-f]{40}/", file.url), "a checked file is fetched at a commit, or it may change"


def test_every_node_with_a_file_has_an_entry() -> None:
    listed = {entry.node for entry in entries()}
    assert listed | set(catalogue.without_files()) == set(nodes())
    assert {
        "azure_code",
        "mooncake_synthetic",
        "lmcache_miniswe",
        "sharegpt_turns",
        "castillo",
        "bailian",
        "burstgpt",
    } <= listed
    assert {"synthetic", "table"} <= set(catalogue.without_files())
    assert len({entry.name for entry in entries()}) == len(entries())
    assert [e.node for e in entries() if e.name == "burstgpt_3"] == ["burstgpt"]  # a node can choose it, none does


def test_a_node_outside_the_package_has_no_origin() -> None:
    assert origins({"_target_": "mine.loader.load"}) == {} and origins({}) == {}


# --- what is found ----------------------------------------------------------------------------------------------------


def test_the_listing_says_missing_and_how_to_get_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 0
    block = out[out.index("azure_code  ") :].split("\nazure_conv ")[0]
    assert "missing" in block and "CC-BY-4.0" in block and "https://github.com/Azure" in block
    assert f"get it: lengthwise data fetch=azure_code, or put {NAME}" in block
    assert "get it: made of" in out[out.index("castillo.lengths") :]


@pytest.mark.parametrize("packed", [False, True])
def test_a_found_file_is_checked_by_its_content(folder: Path, known: Origin, packed: bool, capsys: Any) -> None:
    path = folder / (NAME + ".gz" if packed else NAME)
    path.write_bytes(gzip.compress(TEXT) if packed else TEXT)
    _, out, _ = run(capsys)
    assert f"found {path.name} ({len(TEXT)} bytes, checksum ok)" in out and str(folder) not in out
    other = TEXT.replace(b"48", b"49")
    path.write_bytes(gzip.compress(other) if packed else other)
    state = status(known)
    assert state.differs and SHA in state.checksum and hashlib.sha256(other).hexdigest() in state.checksum
    _, out, _ = run(capsys, "check=false")
    assert f"found {path.name}" in out and "checksum not looked at" in out
    assert files_of(nodes()["azure_code"]) == [path]


def test_a_file_without_a_recorded_checksum(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "BurstGPT_without_fails_1.csv").write_text("x")
    _, out, _ = run(capsys)
    assert "found BurstGPT_without_fails_1.csv (checksum not recorded)" in out


def test_the_publishers_own_file_goes_first(folder: Path) -> None:
    (folder / "azure_llm_2023_code.csv.gz").write_bytes(gzip.compress(TEXT))
    there = found(azure.ORIGINS["azure_code"])
    assert there is not None and there[1].name == "azure_llm_2023_code.csv.gz" and sha256(there[1]) == SHA
    (folder / NAME).write_bytes(TEXT)
    there = found(azure.ORIGINS["azure_code"])
    assert there is not None and there[1].name == NAME


# --- fetching ---------------------------------------------------------------------------------------------------------


def test_without_a_network_one_clear_line(folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    code, out, err = run(capsys, "fetch=azure_code")
    assert code == 1 and not out and len(err.strip().splitlines()) == 1
    assert "cannot fetch https://github.com/Azure" in err and "no connection" in err and NAME in err
    assert list(folder.iterdir()) == []


def test_fetch_puts_the_checked_file_where_loaders_look(folder: Path, known: Origin, capsys: Any, monkeypatch: Any) -> None:
    asked: list[str] = []

    def download(url: str, output_file: Any, _: Any, check_only: bool = False) -> None:
        asked.append(url)
        Path(output_file).write_bytes(TEXT)

    monkeypatch.setattr(pooch.core, "choose_downloader", lambda *_, **__: download)
    code, out, _ = run(capsys, "fetch=azure_code")
    assert code == 0 and asked == [known.files[0].url] and (folder / NAME).read_bytes() == TEXT
    assert "checksum ok" in out
    assert len(azure.load("azure_code")) == 2
    code, out, _ = run(capsys, "fetch=azure_code")
    assert code == 0 and "there already" in out and len(asked) == 1
    code, _, _ = run(capsys, "fetch=azure_code", f"to={folder / 'elsewhere'}")
    assert code == 0 and (folder / "elsewhere" / NAME).read_bytes() == TEXT


def test_another_content_than_recorded_is_not_kept(folder: Path, known: Origin, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(
        pooch.core, "choose_downloader", lambda *_, **__: lambda url, file, _: Path(file).write_bytes(b"<html>moved</html>")
    )
    code, _, err = run(capsys, "fetch=azure_code")
    assert code == 1 and "another content than recorded" in err and not (folder / NAME).exists()
    (folder / NAME).write_bytes(b"mine")
    code, _, err = run(capsys, "fetch=azure_code")
    assert code == 1 and "move it away first" in err and (folder / NAME).read_bytes() == b"mine"


@pytest.mark.parametrize("error", [requests.exceptions.HTTPError("404 Client Error: Not Found"), PermissionError("read-only")])
def test_other_failures_are_one_line_too(folder: Path, capsys: Any, monkeypatch: Any, error: Exception) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(pooch, "retrieve", failing)
    code, _, err = run(capsys, "fetch=azure_conv")
    assert code == 1 and str(error) in err and len(err.strip().splitlines()) == 1


def test_what_cannot_be_fetched_says_what_to_do(folder: Path, capsys: Any, monkeypatch: Any) -> None:
    code, _, err = run(capsys, "fetch=castillo.lengths")
    assert code == 1 and "made of the project's data/preprocessed" in err
    code, _, err = run(capsys, "fetch=azure_cod")
    assert code == 1 and "'azure_cod' is not one of" in err and "azure_code" in err
    monkeypatch.delenv("LENGTHWISE_DATA")
    with pytest.raises(fetching.NotFetched, match="set LENGTHWISE_DATA, or give to=FOLDER"):
        fetching.target_folder(None)


# --- show, and the command line ---------------------------------------------------------------------------------------


def test_show_summarises_a_workload(folder: Path, known: Origin, capsys: Any) -> None:
    code, out, err = run(capsys, "show=azure_code")
    assert code == 1 and NAME in err and "lengthwise data" in err and not out  # T12 a: not there, nothing else taken
    (folder / NAME).write_bytes(TEXT)
    code, out, _ = run(capsys, "show=azure_code", "max_output=12")
    said = dict(line.split(None, 1) for line in out.splitlines())
    assert code == 0 and said["n"] == "2" and said["rate"] == "0.5" and said["longest_gap"] == "2" and said["censored"] == "0.5"
    code, out, err = run(capsys, "show=azure_code", "path=./no_such.csv")
    assert code == 1 and "no_such.csv" in err and not out
    code, out, _ = run(capsys, "show=synthetic", "num_rows=50", "correlation=0")
    assert code == 0 and re.search(r"^n +50$", out, re.M)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["show=azur_code"], 1, "workload 'azur_code' is not one of"),
        (["show=synthetic", "rows=5"], 1, "no argument 'rows'; it has num_rows"),
        (["fetch=azure_code", "into=x"], 1, "takes to=FOLDER besides, not into"),
        (["list"], 2, "'list' is not KEY=VALUE"),
        (["fecth=azure_code"], 2, "there are check=false, fetch=NAME, show=NODE"),
        (["check=maybe"], 2, "check=false"),
    ],
)
def test_refusals(folder: Path, capsys: Any, args: list[str], code: int, message: str) -> None:
    got, out, err = run(capsys, *args)
    assert got == code and message in err and not out


def test_help(capsys: Any) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0 and "fetch=NAME" in out and "show=NODE" in out


def test_a_results_hash_knows_the_data_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file under the same name, found below LENGTHWISE_DATA, is another cell."""
    from lengthwise.experiments.cellhash import files

    monkeypatch.setenv("LENGTHWISE_DATA", str(tmp_path))
    node = {"workload": {"_target_": "lengthwise.experiments.workloads.azure.load", "trace": "azure_code", "path": None}}
    assert files(node) == {}
    trace = tmp_path / "AzureLLMInferenceTrace_code.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    first = files(node)
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n")
    assert list(first) == list(files(node)) == [trace.name] and first != files(node)
    (tmp_path / "mine.csv").write_text("a,b\n")
    assert list(files({"path": "mine.csv", "unit": "tokens"})) == ["mine.csv"]
    merged = {"parts": {"code": node["workload"]}, "_target_": "lengthwise.experiments.workloads.merged.load"}
    assert files(merged) == files(node)
