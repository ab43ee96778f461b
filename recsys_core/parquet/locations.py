"""Where input files are: paths, globs and folders, on a disk or in an object store, through pyarrow's filesystems."""

import errno
import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote

import pyarrow as pa
import pyarrow.fs as pafs

from recsys_core.errors import InputError, first_line, printable
from recsys_core.parquet.patterns import URI, is_uri, matches, parts_of, set_aside, split_glob
from recsys_core.parquet.retries import retrying

_SCHEMES = {"s3": "s3", "gs": "gs", "gcs": "gs", "file": "file"}
_OPTIONS = ("endpoint_override", "scheme", "region", "project", "retry_limit_seconds", "tls_ca_file_path")


@dataclass(frozen=True, eq=False)
class Location:
    """A file that is there. `name` is what messages and manifests call it: a local path, or a URI without its options."""

    name: str
    path: str
    """As `filesystem` knows it."""
    bytes: int
    modified_ns: int
    filesystem: pafs.FileSystem = field(repr=False)
    inode: tuple[int, int] | None = None
    """Device and number of a local file, the same under all its names."""

    @property
    def local(self) -> bool:
        """Whether `path` is one of this machine."""
        return isinstance(self.filesystem, pafs.LocalFileSystem)


def find(pattern: str, *, setting: str, data_root: Path | None = None) -> Iterator[Location]:
    """The files that `pattern` names, unsorted: one file, those a glob matches, or all *.parquet below a folder.

    In folders and globs, files and folders that start with _ or . are passed over (half-written or not data, by custom), unless
    the glob itself names such.

    Raises:
        InputError: nothing is there, the store refuses, or a file lies outside of `data_root`.
    """
    if not is_uri(pattern):
        paths = _local(pattern, shown=printable(pattern), setting=setting)
    else:
        filesystem, path, prefix = connect(pattern, setting=setting)
        if not isinstance(filesystem, pafs.LocalFileSystem):
            if data_root is not None:
                raise InputError(
                    f"{setting}: {prefix}/{path}: lies in another store, not below data_root ({data_root}); "
                    "copy it there, or unset data_root"
                )
            yield from _remote(filesystem, path, prefix=prefix, setting=setting)
            return
        paths = _local(path, shown=printable(pattern), setting=setting)
    root = data_root.resolve() if data_root is not None else None
    filesystem = pafs.LocalFileSystem()
    for found in paths:
        name = printable(found)
        if not _is_utf8(found):
            raise InputError(f"{setting}: {name}: the name of the file is not UTF-8; rename it")
        target = Path(found).resolve()
        if root is not None and not target.is_relative_to(root):
            raise InputError(
                f"{setting}: {name}: leads to {printable(str(target))}, which is not below data_root ({root}); "
                "move the file there, or change data_root"
            )
        status = target.stat()
        yield Location(name, found, status.st_size, status.st_mtime_ns, filesystem, (status.st_dev, status.st_ino))


def _local(pattern: str, *, shown: str, setting: str) -> list[str]:
    if "\0" in pattern:
        raise InputError(f"{setting}: {shown}: a path holds no NUL")
    try:
        return _local_files(pattern, shown=shown, setting=setting)
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise InputError(f"{setting}: {shown}: {error.strerror}; check the path and its permissions") from error


def _local_files(pattern: str, *, shown: str, setting: str) -> list[str]:
    # A file of exactly this name is meant, even if the name reads as a pattern.
    if Path(pattern).is_file():
        return [pattern]
    if Path(pattern).is_dir():
        found = [path for path in _walk(pattern, ()) if path.endswith(".parquet") and not set_aside(path, below=pattern)]
        if not found:
            raise InputError(f"{setting}: no *.parquet file in or below the folder {shown}")
    elif not glob.has_magic(pattern):
        raise InputError(f"{setting}: no such file: {shown}")
    else:
        matched = _glob(pattern)
        found = [path for path in matched if Path(path).is_file()]
        if not found:
            folders = f"; {len(matched)} folders do: end it in /**/*.parquet for what is in them" if matched else ""
            raise InputError(f"{setting}: no file matches: {shown}{folders}")
    return found


def _glob(pattern: str) -> list[str]:
    base, tail = split_glob(pattern)
    if "**" in tail:  # glob follows links that lead back up again and again
        below = _walk(base or ".", ())
        found = [path if base else os.path.relpath(path, ".") for path in below]
        found = [path for path in found if matches(parts_of(path, base), tail)]
    else:
        found = glob.glob(pattern)  # noqa: PTH207  # the pattern may be absolute
    return found if any(part[0] in "_." for part in tail if part) else [p for p in found if not set_aside(p, below=base)]


def _walk(folder: str, above: tuple[str, ...]) -> Iterator[str]:
    """All files below `folder`, through links too, except a link to a folder that we are in."""
    real = os.path.realpath(folder)
    if real in above:
        return
    try:
        with os.scandir(folder) as entries:
            children = [(entry.path, entry.is_dir()) for entry in entries]
    except OSError as error:
        raise InputError(f"{printable(folder)}: the folder cannot be listed: {error.strerror}") from error
    for path, is_folder in children:
        if is_folder:
            yield from _walk(path, (*above, real))
        elif Path(path).is_file():  # no dangling link, no pipe
            yield path


def connect(uri: str, *, setting: str) -> tuple[pafs.FileSystem, str, str]:
    """The filesystem of `uri`, the path in it, and the scheme with what stands before that path."""
    match = URI.fullmatch(uri)
    assert match is not None  # is_uri
    given, authority, path, query = match.groups()
    user, _, host = authority.rpartition("@")
    shown = printable(f"{given}://{host}{path}")
    scheme = _SCHEMES.get(given.lower())
    if scheme is None:
        raise InputError(f"{setting}: {shown}: {given}:// is not known; give a local path, or file://, s3:// or gs://")
    if user and not (scheme == "gs" and user == "anonymous"):
        raise InputError(
            f"{setting}: {shown}: holds credentials; take them out and give them in the environment "
            "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or GOOGLE_APPLICATION_CREDENTIALS)"
        )
    options = dict(parse_qsl(query or "", keep_blank_values=True))
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise InputError(f"{setting}: {shown}: unknown options {unknown}; there are {list(_OPTIONS)}")
    if scheme == "file":
        if host not in ("", "localhost"):
            raise InputError(f"{setting}: {shown}: names another machine; a local file is file:///and/its/path")
        return pafs.LocalFileSystem(), unquote(path), "file:/"
    if not host:
        raise InputError(f"{setting}: {shown}: names no bucket; write {given}://bucket/path")
    # Only the bucket goes through pyarrow's parser, which refuses the characters of a glob.
    asked = "&".join(f"{key}={quote(value)}" for key, value in options.items())
    bucket = f"{scheme}://{authority}?{asked}"
    try:
        filesystem, _ = retrying(lambda: pafs.FileSystem.from_uri(bucket))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{setting}: {shown}: {_why(error)}") from error
    return filesystem, host + unquote(path).rstrip("/"), f"{given.lower()}:/"


def _remote(filesystem: pafs.FileSystem, path: str, *, prefix: str, setting: str) -> Iterator[Location]:
    shown = printable(f"{prefix}/{path}")

    def listing(selector: pafs.FileSelector | str) -> list[pafs.FileInfo]:
        try:
            found = retrying(lambda: filesystem.get_file_info(selector))
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{setting}: {shown}: {_why(error)}") from error
        return found if isinstance(found, list) else [found]

    (itself,) = listing(path)
    if itself.type == pafs.FileType.File:
        files = [itself]
    elif itself.type == pafs.FileType.Directory:
        below = listing(pafs.FileSelector(path, recursive=True))
        files = [info for info in below if info.path.endswith(".parquet") and not set_aside(info.path, below=path)]
        files = [info for info in files if info.type == pafs.FileType.File]
        if not files:
            raise InputError(f"{setting}: no *.parquet file in or below the folder {shown}")
    elif listing(bucket := path.partition("/")[0])[0].type == pafs.FileType.NotFound:
        raise InputError(f"{setting}: no such bucket: {printable(f'{prefix}/{bucket}')}")
    elif not glob.has_magic(path):
        raise InputError(f"{setting}: no such file: {shown}")
    else:
        base, tail = split_glob(path)
        below = listing(pafs.FileSelector(base, recursive=len(tail) > 1 or tail == ["**"], allow_not_found=True))
        named = any(part[0] in "_." for part in tail if part)
        matched = [info for info in below if matches(parts_of(info.path, base), tail)]
        files = [
            info for info in matched if info.type == pafs.FileType.File and (named or not set_aside(info.path, below=base))
        ]
        if not files:
            folders = f"; {len(matched)} folders do: end it in /**/*.parquet for what is in them" if matched else ""
            raise InputError(f"{setting}: no file matches: {shown}{folders}")
    for info in files:
        yield Location(printable(f"{prefix}/{info.path}"), info.path, info.size, info.mtime_ns or 0, filesystem)


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _why(error: BaseException) -> str:
    """What a store answered, in words that say what to do."""
    told = first_line(error)
    if isinstance(error, FileNotFoundError) or "NO_SUCH_BUCKET" in told or getattr(error, "errno", None) == errno.ENOENT:
        return f"no such bucket or folder ({told})"
    if "ACCESS_DENIED" in told or "INVALID_ACCESS_KEY" in told or "SIGNATURE" in told or "403" in told:
        return f"the store refuses these credentials; check those in the environment ({told})"
    return f"the store does not answer as it should ({told})"
