"""The manual pages and the README say what the code does: options, exit codes, bytes of session files, verbs."""

import argparse
import inspect
import pathlib
import re
import struct
import subprocess
import sys
import tomllib

import pytest

import engine
import serveloop
import sessionlayout as layout
import storefolder
import storelayout as store
import strata
import verbs
from options import ALL_OPTIONS, VERSION

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "man/strata.1").read_text()
FORMAT_PAGE = (ROOT / "man/strata-session.5").read_text()
STORE_PAGE = (ROOT / "man/strata-store.5").read_text()
VERBS_PAGE = (ROOT / "man/strata-verbs.5").read_text()
TYPE_OF = {"B": "u8", "H": "u16", "Q": "u64", "q": "i64", "I": "u32", "i": "i32", "s": "bytes"}


def parsers(parser: argparse.ArgumentParser, name: str = "strata"):
    """Every parser of the command line with its name."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, child in action.choices.items():
                yield from parsers(child, f"{name} {word}")


def options(parser: argparse.ArgumentParser) -> set[str]:
    """The long options that a user may see."""
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    return {word for action in shown for word in action.option_strings if word.startswith("--")}


COMMANDS = dict(parsers(strata.get_parser()))
FLAGS = set().union(*map(options, COMMANDS.values()))


def plain(page: str) -> str:
    """A manual page without its markup."""
    return re.sub(r"\\f[BIR]|\\[,/]", "", page).replace("\\-", "-")


# --- strata.1 and the README against the parser ---


def test_the_page_has_every_option_and_no_other():
    assert set(re.findall(r"--[a-z][a-z-]+", plain(PAGE))) == FLAGS - {"--help"}


def test_the_page_is_the_one_that_make_man_writes(tmp_path):
    lines = subprocess.run(
        [
            "make",
            "--no-print-directory",
            "--dry-run",
            "man",
            "PYTHON=true",
            f"RUN={pathlib.Path(sys.executable).parent}/",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    command = lines[lines.index("SOURCE_DATE_EPOCH") :].replace("man/strata.1", f"{tmp_path}/strata.1")
    subprocess.run(command, cwd=ROOT, shell=True, check=True)
    assert (tmp_path / "strata.1").read_text() == PAGE


def test_the_readme_names_only_options_and_commands_that_exist():
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) <= FLAGS
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", README, re.DOTALL))
    shown = {f"strata {words}" for words in re.findall(r"\bstrata ((?:(?:session|store) )?[a-z]+)", code)}
    assert shown == COMMANDS.keys() - {"strata", "strata session", "strata store"}


@pytest.mark.parametrize("option", ALL_OPTIONS, ids=lambda option: option.name)
def test_the_help_of_an_option_says_its_default(option):
    assert option.default is None or f"(default: {option.default}" in option.help


@pytest.mark.parametrize("code", [strata.EXIT_OK, strata.EXIT_FAILED, 2])
def test_exit_codes_are_documented(code):
    assert re.search(rf"^\.B {code}$", PAGE, re.MULTILINE)


def test_one_version_everywhere():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert tool["dynamic"]["version"] == {"attr": "options.VERSION"}
    assert (ROOT / "CHANGELOG.md").read_text().count(f"\n## {VERSION}") == 1


def test_the_readme_lists_the_modules_of_the_wheel_in_their_wings():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed = re.findall(r"^(\w+)\.py ", README, re.MULTILINE)
    assert listed == tool["py-modules"], "one order in both"
    assert set(listed) == {path.stem for path in ROOT.glob("*.py")}


def test_make_quick_leaves_out_every_marker_and_each_is_used():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    markers = [line.split(":")[0] for line in project["tool"]["pytest"]["ini_options"]["markers"]]
    left_out = re.search(r"^LONG := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert left_out.split(" or ") == markers
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    assert [marker for marker in markers if not re.search(rf"pytest\.mark\.{marker}\b", tests)] == []


# --- strata-session.5 against sessionlayout.py ---


def table(section: str, page: str = FORMAT_PAGE) -> list[list[str]]:
    """The rows of the first table in a section, below its heading."""
    text = page.split(f".SS {section}\n")[1]
    rows = text.split(".TS\n")[1].split("\n.TE")[0].splitlines()[3:]
    return [[cell.replace("\\&", "").replace("\\-", "-") for cell in row.split("|")] for row in rows]


def fields(record: struct.Struct) -> list[tuple[int, str]]:
    """Bytes and type of every field of a struct, in order."""
    codes = re.findall(r"(\d*)([a-zA-Z])", record.format)
    single = [(code, count) for count, code in codes if code == "s"]
    spread = [(code, "") for count, code in codes if code != "s" for _ in range(int(count or 1))]
    in_order = single + spread if codes[0][1] == "s" else spread + single
    return [(struct.calcsize("<" + count + code), TYPE_OF[code]) for code, count in in_order]


def fields_in_order(record: struct.Struct) -> list[tuple[int, str]]:
    """The same for a struct with texts between numbers."""
    codes = re.findall(r"(\d*)([a-zA-Z])", record.format)
    return [
        (struct.calcsize("<" + size + code), TYPE_OF[code])
        for count, code in codes
        for size in ([count] if code == "s" else [""] * int(count or 1))
    ]


def test_header_table():
    offset, expected = 0, []
    for (size, kind), name in zip(fields(layout.HEADER), layout.Header._fields, strict=True):
        expected.append([str(offset), str(size), kind, name.replace("_", " ")])
        offset += size
    assert table("Header") == expected
    assert offset == layout.HEADER.size == 64


def test_payload_table():
    rows = table("Payload")
    expected, offset = [], layout.HEADER.size
    for record, kind in ((layout.GEOMETRY, "18 i64"), (layout.LAYER_RANGE, "2 i64"), (layout.COUNT, "u64")):
        expected.append([str(offset), str(record.size), kind])
        offset += record.size
    assert [row[:3] for row in rows[:3]] == expected
    assert rows[3][0] == str(layout.LIVE_OFFSET) == str(offset)
    assert len(fields(layout.GEOMETRY)) == 18


def test_record_table():
    counted = [[["8", "u64", f"{name} size"], ["", "bytes", name]] for name in layout.STATE_ARRAYS]
    expected = [["8", "u64", "token count"], ["4 each", "i32", "token ids"], ["8", "u64", "image count"]]
    expected += [[f"{layout.IMAGE.size} each", ", ".join(kind for _, kind in fields(layout.IMAGE)), "images"]]
    expected += [row for pair in counted for row in pair] + [["8", "u64", "used"]]
    assert table("Record") == expected


def test_layer_table():
    header = [
        [str(size), kind, name]
        for (size, kind), name in zip(fields(layout.KV_HEADER), layout.KvHeader._fields, strict=True)
    ]
    counted = [[["8", "u64", f"{name} size"], ["", "bytes", name]] for name in layout.KV_PARTS]
    assert table("K/V layer") == header + [row for pair in counted for row in pair]


def test_trailer_table():
    sizes = fields(layout.TRAILER)
    assert table("Trailer") == [
        [str(-layout.TRAILER.size), str(sizes[0][0]), sizes[0][1], "payload hash"],
        [str(-sizes[1][0]), str(sizes[1][0]), sizes[1][1], "end mark"],
    ]


def test_kinds_of_refusals():
    listed = FORMAT_PAGE.split("one of these words:\n")[1].split("A restore reads")[0]
    assert tuple(re.findall(r"\.BR (\w+)", listed)) == verbs.ERROR_KINDS


def test_numbers_in_the_text():
    assert f"The file's size less {layout.FRAME_BYTES}." in FORMAT_PAGE
    assert f"limited by {layout.MIN_CHECKPOINT_BYTES} bytes per checkpoint" in FORMAT_PAGE.replace("\n", " ")
    for mark, name in ((layout.START_MARK, "STRSESS"), (layout.END_MARK, "STRSEND")):
        assert mark == name.encode() + b"\x01"
        assert f"seven characters {name}" in FORMAT_PAGE


# --- strata-verbs.5 against verbs.py ---


def test_every_verb_has_its_form_in_the_page():
    commands = VERBS_PAGE.split(".SH COMMANDS\n")[1].split(".SS ")[0]
    assert re.findall(r"^\.TP\n\.B (.*)$", commands, re.MULTILINE) == list(verbs.VERBS.values())
    assert all(re.search(rf"^\.BI? \"?{verb}|^\.BR {verb}", PAGE, re.MULTILINE) for verb in verbs.VERBS)


def test_every_line_has_its_fields_in_the_page():
    sections = re.findall(r"^\.SS (.*)$", VERBS_PAGE, re.MULTILINE)
    assert sections == ["Keys", *verbs.RECORDS]
    for word, record in verbs.RECORDS.items():
        rows = [row[:2] for row in table(word, VERBS_PAGE)]
        assert rows == [[name, kind.name] for name, kind in zip(record._fields, verbs.KINDS[record], strict=True)]


def test_every_key_has_its_range_and_default_in_the_page():
    defaults = vars(verbs.SamplingOptions()) | {"seed": "random", "stop": "none", "label": "none"}
    defaults |= {key: int(verbs.GenRequest._field_defaults[field]) for key, field in verbs.SWITCHES.items()}
    ranges = [(name, "number", *limits) for name, limits in verbs.REAL_KEYS.items()]
    ranges += [(name, "whole", *limits) for name, limits in verbs.WHOLE_KEYS.items()]
    ranges += [("stop", "ids", 0, verbs.MAX_INT32), ("label", "text", 0, verbs.MAX_LABEL_BYTES)]
    expected = [[name, kind, *(str(end).removesuffix(".0") for end in (low, high, defaults[name]))]
                for name, kind, low, high in ranges]  # fmt: skip
    assert table("Keys", VERBS_PAGE) == expected
    second = VERBS_PAGE.split("second spelling:\n")[1].split("\n.TE")[0].splitlines()[4:]
    assert dict(row.split("|") for row in second) == verbs.REFERENCE_KEYS


def test_what_the_verbs_page_lists_is_what_there_is():
    text = plain(VERBS_PAGE).replace("\n", " ")
    info = re.findall(r'"(\w+)":', inspect.getsource(engine.Engine.info))
    stats = re.findall(r'^ {12}"(\w+)":', inspect.getsource(engine.Session.stats), re.MULTILINE)
    phases = {phase for path in ROOT.glob("*.py") for phase in re.findall(r'\bphase\("(\w+)"', path.read_text())}
    assert f"The keys: {', '.join(info)}." in text
    assert f"Its keys: {', '.join(stats)}." in text
    assert set(re.search(r"The steps: ([a-z, ]*)\.", text)[1].split(", ")) == phases
    assert f"more than {serveloop.MAX_LINE_BYTES >> 20} MiB" in text
    assert f"and {verbs.SPARE_CELLS} spare cells" in text
    assert f"0 to {verbs.MAX_INT32}." in text
    assert f"is {verbs.MIN_ALLOWANCE_S} s and one more for every 4 MiB, at most {verbs.MAX_ALLOWANCE_S} s." in text
    assert f"A count from 1 to {verbs.MAX_ALLOWANCE_S}." in text
    assert all(word in text for word in (*verbs.SOURCES, *verbs.FINISHES, *verbs.ERROR_KINDS, *verbs.LOG_WORDS))


def test_the_example_in_the_verbs_page_is_one_that_both_sides_read():
    gen, *answers = VERBS_PAGE.split(".nf\n")[1].split("\n.fi")[0].splitlines()
    assert verbs.parse_gen(gen.removeprefix("GEN ").encode()).max_new == 2
    assert all(verbs.line_of(verbs.read(line, *verbs.GENERATION)) == line for line in answers)


def test_every_manual_page_goes_into_the_wheel():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    listed = {name for names in data.values() for name in names if name.startswith("man/")}
    assert listed == {f"man/{path.name}" for path in (ROOT / "man").glob("*.[15]")}


# --- strata-store.5 against storelayout.py ---


def test_the_header_of_a_store_file():
    offset, expected = 0, []
    for (size, kind), name in zip(fields_in_order(store.HEADER), store.Header._fields, strict=True):
        expected.append([str(offset), str(size), kind, name.replace("_", " ")])
        offset += size
    assert table("Header", STORE_PAGE) == expected
    assert offset == store.HEADER.size
    assert tuple(store.Header._fields[-5:]) == store.STATE_PARTS
    assert f"header bytes\n{offset}.\n" in STORE_PAGE


def test_the_records_of_a_store_file():
    def each(record: struct.Struct) -> str:
        kinds = [kind for _, kind in fields_in_order(record)]
        return ", ".join(kind if (n := kinds.count(kind)) == 1 else f"{n} {kind}" for kind in dict.fromkeys(kinds))

    records = (("layer", store.LAYER), ("segment", store.SEGMENT), ("state", store.STATE))
    expected = [[str(record.size), name, each(record)] for name, record in records]
    assert table("Table", STORE_PAGE) == [*expected, [str(store.ID_BYTES), "token id", "i32"], ["1", "label", "bytes"]]


def test_numbers_of_a_store_file():
    text = plain(STORE_PAGE).replace("\n", " ")
    for mark, name in ((store.START_MARK, "STRSTOR"), (store.END_MARK, "STRSTEN")):
        assert mark == name.encode() + b"\x01"
        assert f"seven characters {name}" in text
    assert f"pieces of {store.data_bytes()} bytes" in text
    assert f"a checksum of {store.CHECKSUM.size} bytes" in text
    assert f"hash of {store.KEY_BYTES} bytes" in text
    assert f"stand {store.HASH_BYTES} bytes: the BLAKE2b hash of {store.HASH_BYTES} bytes" in text
    assert f"count of tokens (1 to {store.SEGMENT_TOKENS})" in text
    assert f"a page, which is {store.PAGE} cells" in text
    assert f"At most {store.MAX_LABEL_BYTES}." in text
    assert [row[1] for row in table("Header", STORE_PAGE) if row[3] == "identity"] == [str(store.IDENTITY_BYTES)]


def test_names_in_a_store():
    assert "16 hexadecimal digits, a hyphen, 8 more and .store" in STORE_PAGE
    assert storefolder.NAME.fullmatch(f"{'0a' * 8}-{'1b' * 4}.store")
    assert storefolder.DAMAGED.fullmatch(f"{'0a' * 8}-{'1b' * 4}.store.damaged")
    assert f".I {storefolder.LOCK_NAME}\n" in STORE_PAGE


# --- strata-http.5 against the routes ---


def test_the_page_of_routes_has_all_of_them():
    """Placeholders of the page stand for those of the code; the one slot is named."""
    page = (ROOT / "man/strata-http.5").read_text().split(".SH ROUTES\n")[1].split(".SH ")[0].replace("\\-", "-")
    named = {(method, path) for method, paths in re.findall(r"^\.B ([A-Z]+) (.+)$", page, re.MULTILINE)
             for path in paths.split(", ")}  # fmt: skip
    source = (ROOT / "httproutes.py").read_text()
    verbs_of = {"get": "GET", "post": "POST", '["DELETE"]': "DELETE"}
    routes = re.findall(r'Route\("([^"]+)", .*methods=(.+?)\),?$', source, re.MULTILINE)
    listed = {(verbs_of[methods], re.sub(r"\{(\w+)[^}]*\}", lambda m: {"slot": "0"}.get(m[1], m[1].upper()), path))
              for path, methods in routes}  # fmt: skip
    assert named == listed
