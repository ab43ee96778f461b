"""Input files on local disks and in object stores: paths, globs, folders and URIs, through pyarrow's filesystems."""

import errno
import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qsl, quote, unquote

import pyarrow as pa
import pyarrow.fs as pafs
import tenacity

from recsys_core.config import URI, is_uri
from recsys_core.errors import InputError, first_line, printable

SIDECAR = ".sha256"
"""Suffix of a sidecar: the file that contains the checksum of another file."""
_SCHEMES = {"s3": "s3", "gs": "gs", "gcs": "gs", "file": "file"}
_ATTEMPTS = 3
"""Number of attempts of `retrying`. In each attempt the SDK of the store retries as well."""
# pyarrow raises OSError for a lost connection, a damaged page and a rejected key; only the text differs.
_TEMPORARY = re.compile(
    r"NETWORK_CONNECTION|curlCode|REQUEST_TIMEOUT|SLOW_DOWN|THROTTLING|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|HTTP status 5\d\d"
    r"|HTTP response code 5\d\d|UNAVAILABLE|DEADLINE_EXCEEDED|Connection reset|timed out"
)

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Location:
    """An existing file. `name` identifies it in messages and manifests: a local path, or a URI without options."""

    name: str
    path: str
    """Path within `filesystem`."""
    bytes: int
    modified_ns: int
    filesystem: pafs.FileSystem = field(repr=False)
    inode: tuple[int, int] | None = None
    """Device and inode of a local file: equal for all names of the file."""

    @property
    def is_local(self) -> bool:
        """Whether the file is on this machine."""
        return isinstance(self.filesystem, pafs.LocalFileSystem)


def find_files(pattern: str, *, setting: str, allowed_data_root: Path | None = None) -> Iterator[Location]:
    """Find the files of a path, a glob or a folder, in no particular order.

    A folder means all *.parquet files in it and below it. Folders and globs skip files and folders whose names start with _
    or ., because by convention these are incomplete or not data. A glob with such a component, like log/_tmp/*, skips none.

    Raises:
        InputError: no file matches, the store rejects the request, or a file is outside `allowed_data_root`.
    """
    if not is_uri(pattern):
        paths = _find_local(pattern, shown_pattern=printable(pattern), setting=setting)
    else:
        filesystem, path, prefix = connect(pattern, setting=setting)
        if not isinstance(filesystem, pafs.LocalFileSystem):
            if allowed_data_root is not None:
                raise InputError(
                    f"{setting}: {prefix}/{path}: is in an object store, not below allowed_data_root ({allowed_data_root}); "
                    "copy it there, or unset allowed_data_root"
                )
            yield from _find_remote(filesystem, path, prefix=prefix, setting=setting)
            return
        paths = _find_local(path, shown_pattern=printable(pattern), setting=setting)
    root = allowed_data_root.resolve() if allowed_data_root is not None else None
    filesystem = pafs.LocalFileSystem()
    for path in paths:
        name = printable(path)
        if not _is_utf8(path):
            raise InputError(f"{setting}: {name}: the name of the file is not UTF-8; rename it")
        resolved_path = Path(path).resolve()
        if root is not None and not resolved_path.is_relative_to(root):
            raise InputError(
                f"{setting}: {name}: resolves to {printable(str(resolved_path))}, which is not below allowed_data_root "
                f"({root}); move the file there, or change allowed_data_root"
            )
        file_status = resolved_path.stat()
        inode = (file_status.st_dev, file_status.st_ino)
        yield Location(name, path, file_status.st_size, file_status.st_mtime_ns, filesystem, inode)


def connect(uri: str, *, setting: str) -> tuple[pafs.FileSystem, str, str]:
    """Connect to the filesystem of a URI.

    Returns:
        The filesystem, the path within it, and a prefix such as "s3:/". The URI of a path within it is f"{prefix}/{path}".
    """
    match = URI.fullmatch(uri)
    assert match is not None, "callers check is_uri"
    raw_scheme, authority, path, query = match.groups()
    host_or_bucket = authority.rpartition("@")[2]
    shown_uri = printable(f"{raw_scheme}://{host_or_bucket}{path}")
    scheme = _SCHEMES.get(raw_scheme.lower())
    if scheme is None:
        raise InputError(f"{setting}: {shown_uri}: {raw_scheme}:// is not supported; use a local path, file://, s3:// or gs://")
    options = dict(parse_qsl(query or "", keep_blank_values=True))
    if scheme == "file":
        if host_or_bucket not in ("", "localhost"):
            raise InputError(f"{setting}: {shown_uri}: names another machine; write a local file as file:///path/to/file")
        return pafs.LocalFileSystem(), unquote(path), "file:/"
    if not host_or_bucket:
        raise InputError(f"{setting}: {shown_uri}: names no bucket; write {raw_scheme}://bucket/path")
    # Connect with the URI of the bucket, because the path may be a glob, and pyarrow rejects * and ? in a URI.
    encoded_options = "&".join(f"{key}={quote(value)}" for key, value in options.items())
    bucket_uri = f"{scheme}://{authority}?{encoded_options}"
    try:
        filesystem, _ = retrying(lambda: pafs.FileSystem.from_uri(bucket_uri))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{setting}: {shown_uri}: {_explain_store_error(error)}") from error
    return filesystem, host_or_bucket + unquote(path).rstrip("/"), f"{raw_scheme.lower()}:/"


def _find_local(pattern: str, *, shown_pattern: str, setting: str) -> list[str]:
    if "\0" in pattern:
        raise InputError(f"{setting}: {shown_pattern}: a path must not contain NUL")
    try:
        return _match_local(pattern, shown_pattern=shown_pattern, setting=setting)
    except OSError as error:  # the name is too long, or a folder is not accessible
        raise InputError(f"{setting}: {shown_pattern}: {error.strerror}; check the path and its permissions") from error


def _match_local(pattern: str, *, shown_pattern: str, setting: str) -> list[str]:
    # An existing file whose name is equal to the pattern takes precedence over the glob.
    if Path(pattern).is_file():
        return [pattern]
    if Path(pattern).is_dir():
        files = [path for path in _walk(pattern, ()) if path.endswith(".parquet") and not _is_skipped(path, below=pattern)]
        if not files:
            raise InputError(f"{setting}: no *.parquet file in or below the folder {shown_pattern}")
    elif not glob.has_magic(pattern):
        raise InputError(f"{setting}: no such file: {shown_pattern}")
    else:
        matching_paths = _expand_glob(pattern)
        files = [path for path in matching_paths if Path(path).is_file()]
        if not files:
            raise InputError(f"{setting}: no file matches: {shown_pattern}{_folder_hint(len(matching_paths))}")
    return files


def _folder_hint(num_folders: int) -> str:
    return f"; {num_folders} folders match: append /**/*.parquet to read the files below them" if num_folders else ""


def _expand_glob(pattern: str) -> list[str]:
    base, components = _split_glob(pattern)
    if "**" in components:  # glob.glob would follow a link to a parent folder in circles
        paths = [path if base else os.path.relpath(path, ".") for path in _walk(base or ".", ())]
        paths = [path for path in paths if _matches(_components(path, base), components)]
    else:
        paths = glob.glob(pattern)  # noqa: PTH207  # the pattern may be absolute
    return paths if _includes_hidden_files(components) else [path for path in paths if not _is_skipped(path, below=base)]


def _walk(folder: str, parents: tuple[str, ...]) -> Iterator[str]:
    """Yield all files below `folder`, also through links, except links to one of the `parents`."""
    real_path = os.path.realpath(folder)
    if real_path in parents:
        return
    try:
        with os.scandir(folder) as entries:
            children = [(entry.path, entry.is_dir()) for entry in entries]
    except OSError as error:
        raise InputError(f"{printable(folder)}: the folder cannot be listed: {error.strerror}") from error
    for path, is_folder in children:
        if is_folder:
            yield from _walk(path, (*parents, real_path))
        elif Path(path).is_file():  # neither a dangling link nor a pipe
            yield path


def _find_remote(filesystem: pafs.FileSystem, path: str, *, prefix: str, setting: str) -> Iterator[Location]:
    shown_uri = printable(f"{prefix}/{path}")

    def list_files(selector: pafs.FileSelector | str) -> list[pafs.FileInfo]:
        try:
            infos = retrying(lambda: filesystem.get_file_info(selector))
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{setting}: {shown_uri}: {_explain_store_error(error)}") from error
        return infos if isinstance(infos, list) else [infos]

    (path_info,) = list_files(path)
    if path_info.type == pafs.FileType.File:
        files = [path_info]
    elif path_info.type == pafs.FileType.Directory:
        infos_below = list_files(pafs.FileSelector(path, recursive=True))
        files = [info for info in infos_below if info.path.endswith(".parquet") and not _is_skipped(info.path, below=path)]
        files = [info for info in files if info.type == pafs.FileType.File]
        if not files:
            raise InputError(f"{setting}: no *.parquet file in or below the folder {shown_uri}")
    elif list_files(bucket := path.partition("/")[0])[0].type == pafs.FileType.NotFound:
        raise InputError(f"{setting}: no such bucket: {printable(f'{prefix}/{bucket}')}")
    elif not glob.has_magic(path):
        raise InputError(f"{setting}: no such file: {shown_uri}")
    else:
        base, components = _split_glob(path)
        is_recursive = len(components) > 1 or components == ["**"]
        infos_below = list_files(pafs.FileSelector(base, recursive=is_recursive, allow_not_found=True))
        matching_infos = [info for info in infos_below if _matches(_components(info.path, base), components)]
        files = [info for info in matching_infos if info.type == pafs.FileType.File]
        if not _includes_hidden_files(components):
            files = [info for info in files if not _is_skipped(info.path, below=base)]
        if not files:
            raise InputError(f"{setting}: no file matches: {shown_uri}{_folder_hint(len(matching_infos))}")
    for info in files:
        yield Location(printable(f"{prefix}/{info.path}"), info.path, info.size, info.mtime_ns or 0, filesystem)


def _split_glob(pattern: str) -> tuple[str, list[str]]:
    """Split a glob into the folder before its first component with a wildcard, and the components from there on."""
    components = pattern.split("/")
    first = next(index for index, component in enumerate(components) if glob.has_magic(component))
    base = "/".join(components[:first])
    return base or ("/" if pattern.startswith("/") else ""), [component for component in components[first:] if component]


def _components(path: str, base: str) -> list[str]:
    return [component for component in path.removeprefix(base).split("/") if component]


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the components of a path match those of a glob; ** matches any number of folders."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        if len(pattern) == 1:
            return bool(path)
        return any(_matches(path[start:], pattern[1:]) for start in range(len(path)))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])


def _includes_hidden_files(pattern: Sequence[str]) -> bool:
    """Return whether one of the components of a glob starts with _ or . itself."""
    return any(component[0] in "_." for component in pattern)


def _is_skipped(path: str, *, below: str) -> bool:
    """Return whether folders and globs skip `path`: a sidecar, or a path with a hidden component after the folder `below`."""
    is_hidden = any(component[0] in "_." and component not in (".", "..") for component in _components(path, below))
    return path.endswith(SIDECAR) or is_hidden


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def retrying(call: Callable[[], T]) -> T:
    """Return the result of `call`; call it up to three times if the network or the store fails temporarily."""
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_temporary),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=10),
        reraise=True,
    )
    return attempts(call)


def is_temporary(error: BaseException) -> bool:
    """Return whether a retry may succeed because the network failed or the store is overloaded."""
    return isinstance(error, ConnectionError | TimeoutError) or (
        isinstance(error, OSError) and bool(_TEMPORARY.search(str(error)))
    )


def _explain_store_error(error: BaseException) -> str:
    message = first_line(error)
    if isinstance(error, FileNotFoundError) or "NO_SUCH_BUCKET" in message or getattr(error, "errno", None) == errno.ENOENT:
        return f"no such bucket or folder ({message})"
    if "ACCESS_DENIED" in message or "INVALID_ACCESS_KEY" in message or "SIGNATURE" in message or "403" in message:
        return f"the store rejects the credentials from the environment; check them ({message})"
    return f"the store returns an error ({message})"
