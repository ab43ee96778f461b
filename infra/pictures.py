"""Pictures for the documentation: an SVG of a terminal session, and screenshots of HTML pages with headless Chromium.

script --quiet --command "nightjar demo" run.log           # capture a session
python -m infra.pictures terminal run.log docs/img/run.svg --title "nightjar demo"
python -m infra.pictures page <run>/check_data/report.html docs/img/data-report.png --height 1100
python -m infra.pictures history docs/img/history.png      # the page of the last runs, with invented runs
"""

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

_ESCAPE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])")
_WEB_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def main() -> None:
    """Make one picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    terminal = commands.add_parser("terminal", help="a captured terminal session as SVG")
    terminal.add_argument("--title", default="nightjar run")
    terminal.add_argument("--columns", type=int, default=100)
    page = commands.add_parser("page", help="a screenshot of an HTML page as PNG")
    page.add_argument("--width", type=int, default=1100)
    page.add_argument("--height", type=int, default=900)
    history = commands.add_parser("history", help="a screenshot of the page of the last runs, with invented runs")
    for command in (terminal, page):
        command.add_argument("source", help="the captured session, or a file or URL of a page")
    for command in (terminal, page, history):
        command.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "terminal":
        session = Path(arguments.source).read_bytes().decode()  # read_text would replace each \r
        arguments.target.write_text(terminal_svg(session, title=arguments.title, columns=arguments.columns), encoding="utf-8")
    elif arguments.command == "history":
        screenshot_history(arguments.target)
    else:
        screenshot(arguments.source, target=arguments.target, width=arguments.width, height=arguments.height)


def terminal_svg(session: str, *, title: str, columns: int) -> str:
    """Return an SVG of the final screen of a session with ANSI colours. The SVG uses no web fonts."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi("\n".join(final_lines(session))), soft_wrap=True)
    console.print()  # export_svg cuts the last line
    return _WEB_FONTS.sub("", console.export_svg(title=title))


def final_lines(session: str) -> list[str]:
    """Return the final state of each line, after cursor movements of progress bars.

    >>> final_lines("a\\nepoch 1\\r\\x1b[2Kepoch 2\\n\\x1b[1A\\x1b[2Kdone\\n")
    ['a', 'done']
    """
    session = re.sub(r"^Script (started|done).*$\n?", "", session.replace("\r\n", "\n"), flags=re.MULTILINE)
    lines, row = [""], 0
    for piece in re.split(r"(\n|\r|\x1b\[[?0-9;]*[A-Za-z])", session):
        escape = _ESCAPE.fullmatch(piece)
        if piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif escape is not None and escape[2] == "A":
            row = max(0, row - int(escape[1] or 1))
        elif piece == "\r" or (escape is not None and escape[2] == "K"):
            lines[row] = ""
        elif escape is None or escape[2] == "m":
            lines[row] += piece
    return "\n".join(lines).strip("\n").split("\n")


def screenshot(source: str, *, target: Path, width: int, height: int) -> None:
    """Write a PNG of a page."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no chromium on the PATH; install it to make screenshots")
    url = source if "://" in source else Path(source).resolve().as_uri()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=20000"]
    subprocess.run(
        [chromium, *flags, f"--window-size={width},{height}", f"--screenshot={target.resolve()}", url],
        check=True,
        capture_output=True,
    )


def screenshot_history(target: Path) -> None:
    """Write a PNG of the page of the last runs for a month of invented runs."""
    from flows.cli.config_template import starter_config
    from flows.history import newest_promoted_version, run_history
    from flows.history_page import to_html
    from tests.flows.run_folders import month_of_runs

    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        month_of_runs(workspace, stage_bytes=700_000)
        runs = run_history(workspace)
        config = starter_config().model_copy(update={"workspace": workspace, "name": "films"})
        html = to_html(runs, config=config, champion_version=newest_promoted_version(runs))
        page = workspace / "index.html"
        page.write_text(html.replace(folder, "/srv/films"), encoding="utf-8")
        screenshot(str(page), target=target, width=1200, height=1270)


if __name__ == "__main__":
    main()
