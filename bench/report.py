"""The table of measured figures in docs/figures.md and its plots, made from bench/results: one JSON file a machine.

It owns how figures are shown; it measures nothing. A machine's file holds what the benches wrote with --json, each
under its name. Every ratio says how many times better strata is, so that more is better in all rows. Invariant: what
stands between the two marks of that page is what the files say, which --check proves. Read next: machine.py.

Usage: report.py               write the table and the plots
       report.py --check       compare the table, and see that every plot is there
       report.py --add MACHINE FILE.json...   take the figures of a run over; the name of a file is that of its bench
"""

import argparse
import json
import math
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "figures.md"
RESULTS = ROOT / "bench" / "results"
BEGIN = "<!-- figures: written by bench/report.py -->"
END = "<!-- end of figures -->"
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
SAME = ("cpu", "cores")  # facts that two benches of one machine cannot differ in
DIGITS = 4  # as many as a median of a few rounds can bear


class ReportError(Exception):
    """Figures that cannot be shown, or a table that is not theirs; one line."""


def load_results(folder: pathlib.Path) -> dict[str, dict]:
    """Every machine's benches by name."""
    results = {path.stem: _load(path) for path in sorted(folder.glob("*.json"))}
    for machine, benches in results.items():
        _check_machine(machine, benches)
    return results


def _load(path: pathlib.Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ReportError(f"{path}: {error}") from error


def _check_machine(machine: str, benches: dict) -> None:
    """Raise ReportError where the benches have no figures, or were not run on one machine."""
    for name, bench in benches.items():
        if not isinstance(bench, dict) or not all("work" in row for row in bench.get("rows", [{}])):
            raise ReportError(f"{machine}: {name} has no rows that say what was measured")
    for fact in SAME:
        found = {str(bench["machine"][fact]) for bench in benches.values() if fact in bench.get("machine", {})}
        if len(found) > 1:
            raise ReportError(f"{machine}: figures of several machines: {fact} is {' and '.join(sorted(found))}")


def add(folder: pathlib.Path, machine: str, paths: list[str]) -> pathlib.Path:
    """Put the figures of these benches into the machine's file, in place of older ones; returns its path."""
    if not NAME.fullmatch(machine):
        raise ReportError(f"{machine!r}: name a machine by small letters, digits and hyphens, such as xeon-2core")
    merged = folder / f"{machine}.json"
    benches = (_load(merged) if merged.exists() else {}) | {
        pathlib.Path(path).stem: _load(pathlib.Path(path)) for path in paths
    }
    _check_machine(machine, benches)
    folder.mkdir(exist_ok=True)
    merged.write_text(json.dumps(dict(sorted(benches.items())), indent=1) + "\n")
    return merged


# --- The table

HEADING = ("| what | strata | beside it | | times better | target |", "| --- | ---: | --- | ---: | ---: | --- |")


def section(results: dict[str, dict]) -> str:
    """What stands between the marks."""
    return "\n".join(_machine_section(machine, benches) for machine, benches in results.items())


def _machine_section(machine: str, benches: dict) -> str:
    lines = ["", f"{machine}: {_facts(benches)}.", "", *HEADING]
    lines += [line_of(row) for bench in benches.values() for row in bench["rows"]]
    for name, bench in benches.items():
        if bench.get("growth"):
            lines += ["", f"![{name}: growth](../{_plot_path(machine, name).relative_to(ROOT).as_posix()})"]
    return "\n".join([*lines, ""])


def _facts(benches: dict) -> str:
    """The machine as its benches tell it; where they differ, all that was found."""
    found: dict[str, list] = {}
    for bench in benches.values():
        for name, value in bench.get("machine", {}).items():
            if value not in found.setdefault(name, []):
                found[name].append(value)
    shown = {"cpu": "{}", "cores": "{} cores", "memory_gib": "{} GiB", "system": "{}", "threads": "{} threads"}
    return ", ".join(
        shown.get(name, f"{name} {{}}").format(" and ".join(map(str, values))) for name, values in found.items()
    )


def line_of(row: dict) -> str:
    """A figure as a line of the table; what a bench did not measure is a dash."""
    unit = row.get("unit", "s")
    ours, rival = row.get("ours", row.get("ours_s")), row.get("rival_value", row.get("rival_s"))
    ratio, target = row.get("ratio"), row.get("target")
    goal = "–" if target is None else f"{target:.3g}" + (", missed" if ratio is not None and ratio < target else "")
    cells = (row["work"], _value(ours, unit), row.get("rival") or "–", _value(rival, unit), _value(ratio, ""), goal)
    return f"| {' | '.join(cells)} |"


def _value(value: float | None, unit: str) -> str:
    """A number in four digits, with its unit."""
    if value is None:
        return "–"
    decimals = DIGITS - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(decimals, 0)}f} {unit}".rstrip()


def replaced(text: str, new: str) -> str:
    """A text with `new` between its marks."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ReportError(f"the page must have one line {BEGIN!r} and one {END!r} behind it")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{new}{END}{rest.split(END)[1]}"


def check(page: pathlib.Path, results: dict[str, dict]) -> None:
    """Raise ReportError where the page's table is another one, or a plot is missing."""
    text = page.read_text()
    if text != replaced(text, section(results)):
        raise ReportError("the page's table is not that of bench/results: run bench/report.py")
    for path in (_plot_path(machine, name) for machine, name, _ in _plots(results)):
        if not path.exists():
            raise ReportError(f"{path.relative_to(ROOT)} is missing: run bench/report.py")


# --- The plots


def _plot_path(machine: str, bench: str) -> pathlib.Path:
    return RESULTS / f"{machine}-{bench}.svg"


def _plots(results: dict[str, dict]):
    """Machine, bench and figures of all that have curves."""
    return [
        (machine, name, bench)
        for machine, benches in results.items()
        for name, bench in benches.items()
        if bench.get("growth")
    ]


def draw(path: pathlib.Path, figures: dict) -> None:
    """The curves of one bench on logarithmic axes, and growth in proportion from where the first one begins."""
    try:
        import matplotlib
    except ImportError as error:
        raise ReportError("plots need matplotlib: pip install '.[bench]'") from error
    matplotlib.use("svg")
    from matplotlib import pyplot, ticker

    # Text as text, and ids that do not change: the file is the same each time it is drawn.
    style = {"svg.fonttype": "none", "svg.hashsalt": "strata", "axes.grid": True, "grid.alpha": 0.3}
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for label, curve in figures["growth"].items():
            axes.loglog(*zip(*curve, strict=True), marker="o", markersize=3, label=label)
        (x, y), last_x = next(iter(figures["growth"].values()))[0], axes.get_xlim()[1]
        axes.loglog([x, last_x], [y, y * last_x / x], "--", color="grey", label="in proportion")
        axes.set_xticks(sorted({x for curve in figures["growth"].values() for x, _ in curve}), minor=False)
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        x_label, y_label = figures.get("axes", ("", ""))
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.legend(fontsize="small")
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def main() -> None:
    """Write, check or add."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 where the page says otherwise")
    parser.add_argument("--add", metavar="MACHINE", help="name of the machine that the figures come from")
    parser.add_argument("files", metavar="FILE.json", nargs="*", help="with --add: what benches wrote with --json")
    args = parser.parse_args()
    if bool(args.add) != bool(args.files) or (args.check and args.add):
        parser.error("--add takes a machine's name and files; --check takes neither")
    try:
        if args.add:
            print(f"written: {add(RESULTS, args.add, args.files).relative_to(ROOT)}")
            return
        results = load_results(RESULTS)
        if args.check:
            check(PAGE, results)
            return
        PAGE.write_text(replaced(PAGE.read_text(), section(results)))
        for machine, name, figures in _plots(results):
            draw(_plot_path(machine, name), figures)
    except ReportError as error:
        sys.exit(f"report.py: {error}")


if __name__ == "__main__":
    main()
