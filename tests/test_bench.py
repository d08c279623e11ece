"""What benches write down and how docs/figures.md shows it: ratios, rows with gaps, tables and plots of the tree."""

import json
import pathlib
import subprocess
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "bench"))  # its scripts import each other

import report
import servers
import tokens

ROOT = report.ROOT
MACHINE = {"cpu": "a processor", "cores": 2, "python": "3.11.7"}
GROWTH = {"ours": [[1000, 10.0], [2000, 12.5]], "theirs": [[1000, 11.0], [2000, 20.0]]}


def bench(*rows: dict, machine: dict = MACHINE, growth: dict | None = None) -> dict:
    return {"machine": machine, "rows": list(rows), "growth": growth or {}}


@pytest.fixture
def results(tmp_path):
    """Writes figures as benches do and adds them to a machine; returns the folder of results."""

    def write(machine: str, **benches: dict) -> pathlib.Path:
        for name, figures in benches.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(figures))
        report.add(tmp_path / "results", machine, [str(tmp_path / f"{name}.json") for name in benches])
        return tmp_path / "results"

    return write


# --- The tree


def test_the_page_shows_the_figures_of_the_tree():
    ran = subprocess.run(
        [sys.executable, "bench/report.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")


# --- Rows as tokens.py makes them


@pytest.mark.parametrize(("more", "ratio"), [(True, 2.0), (False, 0.5)])
def test_a_ratio_above_one_says_that_ours_is_better(capsys, more, ratio):
    figures = tokens.Figures("rival", 5)
    figures.add("work", "unit", 20.0, 10.0, more=more)
    expected = {"work": "work", "rival": "rival", "ours": 20.0, "rival_value": 10.0, "unit": "unit"}
    assert figures.rows == [expected | {"ratio": ratio, "target": 1.0, "rounds": 5}]
    assert capsys.readouterr().out == f"work: 20 unit; rival 10, ratio {ratio:.3f}\n"


def test_without_a_rival_there_is_no_ratio(capsys):
    figures = tokens.Figures(None, 5)
    figures.add("work", "s", 1.23456789)
    assert (figures.rows[0]["ours"], figures.rows[0]["ratio"], figures.rows[0]["rival"]) == (1.2346, None, None)
    assert capsys.readouterr().out == "work: 1.2346 s\n"


class Scripted:
    """A server whose turns take the seconds that it is told."""

    def __init__(self, name: str, seconds: list[float], asked: list[str]):
        self.name, self._seconds, self._asked = name, seconds, asked

    def erase(self) -> None:
        """Holds nothing anyway."""

    def turn(self, ids, n_new, n_reused=None) -> servers.Turn:
        self._asked.append(self.name)
        return servers.Turn([1] * n_new, n_reused or 0, self._seconds.pop(0), 0.0, 0.0)


def test_servers_are_measured_in_turn_and_medians_are_shown():
    asked: list[str] = []
    ours, rival = Scripted("ours", [1.0, 5.0, 2.0], asked), Scripted("rival", [8.0, 4.0, 4.0], asked)
    figures = tokens.Figures("rival", 3)
    tokens.Comparison([ours, rival], tokens.np.arange(64), 3, figures).read(64)
    assert asked == ["ours", "rival"] * 3
    assert (figures.rows[0]["ours"], figures.rows[0]["rival_value"], figures.rows[0]["ratio"]) == (32.0, 16.0, 2.0)


def test_growth_is_held_against_growth_in_proportion():
    figures = tokens.Figures(None, 1)
    server = Scripted("ours", [9.0, 64 * 0.010, 9.0, 64 * 0.015], [])
    tokens.Comparison([server], tokens.np.arange(400), 1, figures).grow("decoding", (100, 400))
    assert figures.growth == {"decoding, ours": [[100, 10.0], [400, 15.0]]}
    row = figures.rows[0]
    assert (row["ours"], row["rival_value"], row["rival"], row["ratio"]) == (15.0, 40.0, "4 x that at 100", 2.6667)


@pytest.mark.parametrize(("n_tokens", "n_reused"), [(3, 7), (4, 6)])
def test_a_turn_that_is_another_one_is_no_figure(n_tokens, n_reused):
    turn = servers.Turn([1] * n_tokens, n_reused, 1.0, 0.5, 0.5)
    with pytest.raises(
        servers.ServerError, match=f"ours answered {n_tokens} tokens and reused {n_reused}, not 4 and 7"
    ):
        servers._checked(Scripted("ours", [], []), turn, 4, 7)


def test_a_file_that_is_no_llama_server_is_told():
    with pytest.raises(servers.ServerError, match="it does not tell a version"):
        servers.llama_version("/bin/true")
    with pytest.raises(servers.ServerError, match="No such file"):
        servers.llama_version("/bin/absent")


def test_a_server_that_ends_at_its_start_is_told_with_its_last_words(tmp_path):
    path = tmp_path / "server"
    path.write_text("#!/bin/sh\necho first; echo no such model; kill -ILL $$\n")
    path.chmod(0o755)
    with pytest.raises(servers.ServerError, match="llama-server ended with SIGILL; its log ends: no such model"):
        servers.LlamaServer(str(path), servers.Settings("m.gguf", 64, 1, str(tmp_path)))


# --- The table


def test_rows_of_every_kind(results):
    full = {
        "work": "reading",
        "rival": "r",
        "ours": 12345.6,
        "rival_value": 9876,
        "unit": "t/s",
        "ratio": 1.25,
        "target": 1,
    }
    seconds = {"work": "saving", "rival": "np.save", "ours_s": 0.012345, "rival_s": 0.01, "ratio": 0.81, "target": 0.9}
    folder = results("xeon-2core", tokens=bench(full), files=bench(seconds, {"work": "alone", "ours": 0, "unit": "s"}))
    shown = report.section(report.load_results(folder))
    assert "\nxeon-2core: a processor, 2 cores, python 3.11.7.\n" in shown
    assert "\n| reading | 12,346 t/s | r | 9,876 t/s | 1.250 | 1 |\n" in shown
    assert "\n| saving | 0.01235 s | np.save | 0.01000 s | 0.8100 | 0.9, missed |\n" in shown
    assert "\n| alone | 0 s | – | – | – | – |\n" in shown


def test_figures_of_a_later_run_replace_those_of_the_same_bench(results):
    results("box", tokens=bench({"work": "old"}), files=bench({"work": "kept"}))
    shown = report.section(report.load_results(results("box", tokens=bench({"work": "new"}))))
    assert [word in shown for word in ("| old |", "| kept |", "| new |")] == [False, True, True]


@pytest.mark.parametrize(
    ("machine", "figures", "message"),
    [
        ("../box", bench(), "name a machine by small letters"),
        ("Box", bench(), "name a machine by small letters"),
        ("box", bench({"rival": "r"}), "box: tokens has no rows that say what was measured"),
        ("box", {}, "box: tokens has no rows"),
        ("box", bench(machine=MACHINE | {"cores": 4}), "figures of several machines: cores is 2 and 4"),
    ],
)
def test_figures_that_cannot_be_shown_are_refused_and_nothing_is_written(results, machine, figures, message):
    folder = results("box", files=bench({"work": "a"}))
    before = (folder / "box.json").read_bytes()
    with pytest.raises(report.ReportError, match=message):
        results(machine, tokens=figures)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"box.json": before}


def test_a_file_that_is_no_json_is_named(tmp_path):
    (tmp_path / "tokens.json").write_text("{")
    with pytest.raises(report.ReportError, match=r"tokens\.json: "):
        report.add(tmp_path / "results", "box", [str(tmp_path / "tokens.json")])


def test_only_what_stands_between_the_marks_is_written(results, tmp_path):
    page = tmp_path / "figures.md"
    found = report.load_results(results("box", tokens=bench({"work": "a", "ours": 1.0, "unit": "s"})))
    before = f"# Title\n{report.BEGIN}\nold\n{report.END}\nrest\n"
    page.write_text(before)
    with pytest.raises(report.ReportError, match="not that of bench/results"):
        report.check(page, found)
    page.write_text(report.replaced(before, report.section(found)))
    report.check(page, found)
    assert page.read_text().startswith(f"# Title\n{report.BEGIN}\n\nbox: ")
    assert page.read_text().endswith(f"| 1.000 s | – | – | – | – |\n{report.END}\nrest\n")


def test_a_page_without_marks_is_refused():
    with pytest.raises(report.ReportError, match="the page must have one line"):
        report.replaced("# Title\n", "")


# --- The plots


def test_a_plot_that_is_not_there_is_missed(results, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    found = report.load_results(results("box", tokens=bench({"work": "a"}, growth=GROWTH)))
    page = tmp_path / "figures.md"
    page.write_text(report.replaced(f"{report.BEGIN}\n{report.END}\n", report.section(found)))
    assert "![tokens: growth](../results/box-tokens.svg)" in page.read_text()
    with pytest.raises(report.ReportError, match=r"results/box-tokens\.svg is missing"):
        report.check(page, found)
    (tmp_path / "results" / "box-tokens.svg").touch()
    report.check(page, found)


def test_a_plot_is_the_same_each_time_and_its_text_is_text(tmp_path):
    pytest.importorskip("matplotlib", reason="it comes with the extra `bench`")
    figures = bench(growth=GROWTH) | {"axes": ["tokens of context", "ms a token"]}
    for name in ("a.svg", "b.svg"):
        report.draw(tmp_path / name, figures)
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    for text in ("ours", "theirs", "in proportion", "tokens of context", "ms a token", "1,000"):
        assert f">{text}</text>" in drawn
    assert len(drawn) < 1 << 16
