"""Pictures for the documentation: an SVG of a terminal session, and screenshots of HTML pages with headless Chromium.

Commands:

    script --quiet --command "nightjar demo" run.log           # capture a session
    python -m infra.pictures terminal run.log docs/img/run.svg --title "nightjar demo"
    python -m infra.pictures page <run>/check_data/report.html docs/img/data-report.png --height 1100
    python -m infra.pictures page <workspace>/index.html docs/img/history.png --width 1200 --height 1270
"""

import argparse
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

_ANSI_ESCAPE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])")
_WEB_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def main() -> None:
    """Write one picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subparsers = parser.add_subparsers(dest="command", required=True)
    terminal_parser = subparsers.add_parser("terminal", help="a captured terminal session as SVG")
    terminal_parser.add_argument("--title", default="nightjar run")
    terminal_parser.add_argument("--columns", type=int, default=100)
    page_parser = subparsers.add_parser("page", help="a screenshot of an HTML page as PNG")
    page_parser.add_argument("--width", type=int, default=1100)
    page_parser.add_argument("--height", type=int, default=900)
    for subparser in (terminal_parser, page_parser):
        subparser.add_argument("source", help="the captured session, or a file or URL of a page")
        subparser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "terminal":
        session = Path(arguments.source).read_bytes().decode()  # read_text would replace each \r
        arguments.target.write_text(terminal_svg(session, title=arguments.title, columns=arguments.columns), encoding="utf-8")
    else:
        screenshot(arguments.source, png_path=arguments.target, width=arguments.width, height=arguments.height)


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
    lines, line_index = [""], 0
    for segment in re.split(r"(\n|\r|\x1b\[[?0-9;]*[A-Za-z])", session):
        escape_match = _ANSI_ESCAPE.fullmatch(segment)
        if segment == "\n":
            line_index += 1
            lines += [""] * (line_index + 1 - len(lines))
        elif escape_match is not None and escape_match[2] == "A":
            line_index = max(0, line_index - int(escape_match[1] or 1))
        elif segment == "\r" or (escape_match is not None and escape_match[2] == "K"):
            lines[line_index] = ""
        elif escape_match is None or escape_match[2] == "m":
            lines[line_index] += segment
    return "\n".join(lines).strip("\n").split("\n")


def screenshot(path_or_url: str, *, png_path: Path, width: int, height: int) -> None:
    """Write a PNG of the HTML page at `path_or_url`."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no chromium on the PATH; install it to make screenshots")
    url = path_or_url if "://" in path_or_url else Path(path_or_url).resolve().as_uri()
    chromium_flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=20000"]
    subprocess.run(
        [chromium, *chromium_flags, f"--window-size={width},{height}", f"--screenshot={png_path.resolve()}", url],
        check=True,
        capture_output=True,
    )


if __name__ == "__main__":
    main()
