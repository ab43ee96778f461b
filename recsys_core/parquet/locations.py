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

from recsys_core.config import URI_PATTERN, is_uri
from recsys_core.errors import InputError, first_line, printable

_PYARROW_SCHEME_BY_URI_SCHEME = {"s3": "s3", "gs": "gs", "gcs": "gs", "file": "file"}
"""pyarrow's name of each supported scheme of a URI."""
_MAX_CALLS = 3
"""Largest number of calls in `retrying`. The SDK of the store also retries within each call."""
# pyarrow raises OSError for a lost connection, a damaged page and a rejected access key. Only the messages differ.
_TEMPORARY_ERROR_PATTERN = re.compile(
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
    num_bytes: int
    modified_ns: int
    filesystem: pafs.FileSystem = field(repr=False)
    inode: tuple[int, int] | None = None
    """Device and inode of a local file, which are the same for all names of the file; None for a remote file."""

    @property
    def is_local(self) -> bool:
        """Whether the file is on this machine."""
        return isinstance(self.filesystem, pafs.LocalFileSystem)


def find_files(pattern: str, *, setting: str, allowed_data_root: Path | None = None) -> Iterator[Location]:
    """Find the files of a path, a glob or a folder, in no particular order.

    A folder means all *.parquet files in it and below it. Folders and globs skip files and folders whose names start with `_`
    or `.`, because by convention such files are incomplete or not data. A glob with such a name in it, like log/_tmp/*, skips
    no file.

    Raises:
        InputError: no file matches, the store rejects the request, or a file is outside `allowed_data_root`.
    """
    if not is_uri(pattern):
        paths = _find_local_paths(pattern, shown_pattern=printable(pattern), setting=setting)
    else:
        filesystem, path, uri_prefix = connect(pattern, setting=setting)
        if not isinstance(filesystem, pafs.LocalFileSystem):
            if allowed_data_root is not None:
                raise InputError(
                    f"{setting}: {uri_prefix}/{path}: is in an object store, not below allowed_data_root "
                    f"({allowed_data_root}); copy it there, or unset allowed_data_root"
                )
            yield from _find_remote_files(filesystem, path, uri_prefix=uri_prefix, setting=setting)
            return
        paths = _find_local_paths(path, shown_pattern=printable(pattern), setting=setting)
    resolved_root = allowed_data_root.resolve() if allowed_data_root is not None else None
    filesystem = pafs.LocalFileSystem()
    for path in paths:
        name = printable(path)
        resolved_path = Path(path).resolve()
        if resolved_root is not None and not resolved_path.is_relative_to(resolved_root):
            raise InputError(
                f"{setting}: {name}: resolves to {printable(str(resolved_path))}, which is not below allowed_data_root "
                f"({resolved_root}); move the file there, or change allowed_data_root"
            )
        file_status = resolved_path.stat()
        inode = (file_status.st_dev, file_status.st_ino)
        yield Location(name, path, file_status.st_size, file_status.st_mtime_ns, filesystem, inode)


def connect(uri: str, *, setting: str) -> tuple[pafs.FileSystem, str, str]:
    """Connect to the filesystem of a URI.

    Returns:
        (filesystem, path, prefix). `path` is a path within the filesystem; its URI without options is f"{prefix}/{path}".
    """
    uri_match = URI_PATTERN.fullmatch(uri)
    assert uri_match is not None, "callers check is_uri"
    uri_scheme, authority, path, options_text = uri_match.groups()
    host_or_bucket = authority.rpartition("@")[2]
    shown_uri = printable(f"{uri_scheme}://{host_or_bucket}{path}")
    pyarrow_scheme = _PYARROW_SCHEME_BY_URI_SCHEME.get(uri_scheme.lower())
    if pyarrow_scheme is None:
        raise InputError(f"{setting}: {shown_uri}: {uri_scheme}:// is not supported; use a local path, file://, s3:// or gs://")
    option_by_name = dict(parse_qsl(options_text or "", keep_blank_values=True))
    if pyarrow_scheme == "file":
        if host_or_bucket not in ("", "localhost"):
            raise InputError(f"{setting}: {shown_uri}: names another machine; write a local file as file:///path/to/file")
        return pafs.LocalFileSystem(), unquote(path), "file:/"
    if not host_or_bucket:
        raise InputError(f"{setting}: {shown_uri}: names no bucket; write {uri_scheme}://bucket/path")
    # pyarrow rejects * and ? in a URI, so its URI names only the bucket and not the path, which may be a glob.
    encoded_options = "&".join(f"{name}={quote(option)}" for name, option in option_by_name.items())
    bucket_uri = f"{pyarrow_scheme}://{authority}?{encoded_options}"
    try:
        filesystem, _ = retrying(lambda: pafs.FileSystem.from_uri(bucket_uri))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{setting}: {shown_uri}: {_explain_store_error(error)}") from error
    return filesystem, host_or_bucket + unquote(path).rstrip("/"), f"{uri_scheme.lower()}:/"


def _find_local_paths(pattern: str, *, shown_pattern: str, setting: str) -> list[str]:
    try:
        return _match_local_paths(pattern, shown_pattern=shown_pattern, setting=setting)
    except OSError as error:  # the name is too long, or a folder is not accessible
        raise InputError(f"{setting}: {shown_pattern}: {error.strerror}; check the path and its permissions") from error


def _match_local_paths(pattern: str, *, shown_pattern: str, setting: str) -> list[str]:
    # An existing file with the name of the pattern takes precedence over the files that match the glob.
    if Path(pattern).is_file():
        return [pattern]
    if Path(pattern).is_dir():
        if (Path(pattern) / "_delta_log").is_dir() or any(Path(pattern).glob("metadata/*.metadata.json")):
            raise InputError(
                f"{setting}: {shown_pattern} is a Delta or Iceberg table, whose parquet files also have rows that were "
                "deleted; set interactions.format if this is the log, or export the table to parquet"
            )
        file_paths = [
            path
            for path in _files_below(pattern, ())
            if path.endswith(".parquet") and not _is_skipped(path, base_folder=pattern)
        ]
        if not file_paths:
            raise InputError(f"{setting}: no *.parquet file in or below the folder {shown_pattern}")
    elif not glob.has_magic(pattern):
        raise InputError(f"{setting}: no such file: {shown_pattern}")
    else:
        matching_paths = _expand_glob(pattern)
        file_paths = [path for path in matching_paths if Path(path).is_file()]
        if not file_paths:
            raise InputError(f"{setting}: no file matches: {shown_pattern}{_folder_hint(len(matching_paths))}")
    return file_paths


def _folder_hint(num_folders: int) -> str:
    return f"; {num_folders} folders match: append /**/*.parquet to read the files below them" if num_folders else ""


def _expand_glob(pattern: str) -> list[str]:
    base_folder, components = _split_glob(pattern)
    if "**" in components:  # glob.glob would follow a link to a parent folder in circles
        matching_paths = [path if base_folder else os.path.relpath(path, ".") for path in _files_below(base_folder or ".", ())]
        matching_paths = [path for path in matching_paths if _matches_glob(_path_components(path, base_folder), components)]
    else:
        matching_paths = glob.glob(pattern)  # noqa: PTH207  # the pattern may be absolute
    return (
        matching_paths
        if _includes_hidden_files(components)
        else [path for path in matching_paths if not _is_skipped(path, base_folder=base_folder)]
    )


def _files_below(folder: str, parent_paths: tuple[str, ...]) -> Iterator[str]:
    """Yield all files below `folder`. Links are followed, except links to one of the `parent_paths`."""
    real_path = os.path.realpath(folder)
    if real_path in parent_paths:
        return
    try:
        with os.scandir(folder) as entries:
            children = [(entry.path, entry.is_dir()) for entry in entries]
    except OSError as error:
        raise InputError(f"{printable(folder)}: the folder cannot be listed: {error.strerror}") from error
    for child_path, is_folder in children:
        if is_folder:
            yield from _files_below(child_path, (*parent_paths, real_path))
        elif Path(child_path).is_file():  # not a dangling link or a pipe
            yield child_path


def _find_remote_files(filesystem: pafs.FileSystem, path: str, *, uri_prefix: str, setting: str) -> Iterator[Location]:
    shown_uri = printable(f"{uri_prefix}/{path}")

    def read_infos(selector: pafs.FileSelector | str) -> list[pafs.FileInfo]:
        try:
            infos = retrying(lambda: filesystem.get_file_info(selector))
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{setting}: {shown_uri}: {_explain_store_error(error)}") from error
        return infos if isinstance(infos, list) else [infos]

    (path_info,) = read_infos(path)
    if path_info.type == pafs.FileType.File:
        file_infos = [path_info]
    elif path_info.type == pafs.FileType.Directory:
        infos_in_folder = read_infos(pafs.FileSelector(path, recursive=True))
        file_infos = [
            info for info in infos_in_folder if info.path.endswith(".parquet") and not _is_skipped(info.path, base_folder=path)
        ]
        file_infos = [info for info in file_infos if info.type == pafs.FileType.File]
        if not file_infos:
            raise InputError(f"{setting}: no *.parquet file in or below the folder {shown_uri}")
    elif read_infos(bucket := path.partition("/")[0])[0].type == pafs.FileType.NotFound:
        raise InputError(f"{setting}: no such bucket: {printable(f'{uri_prefix}/{bucket}')}")
    elif not glob.has_magic(path):
        raise InputError(f"{setting}: no such file: {shown_uri}")
    else:
        base_folder, components = _split_glob(path)
        is_recursive = len(components) > 1 or components == ["**"]
        infos_in_folder = read_infos(pafs.FileSelector(base_folder, recursive=is_recursive, allow_not_found=True))
        matching_infos = [
            info for info in infos_in_folder if _matches_glob(_path_components(info.path, base_folder), components)
        ]
        file_infos = [info for info in matching_infos if info.type == pafs.FileType.File]
        if not _includes_hidden_files(components):
            file_infos = [info for info in file_infos if not _is_skipped(info.path, base_folder=base_folder)]
        if not file_infos:
            raise InputError(f"{setting}: no file matches: {shown_uri}{_folder_hint(len(matching_infos))}")
    for info in file_infos:
        yield Location(printable(f"{uri_prefix}/{info.path}"), info.path, info.size, info.mtime_ns or 0, filesystem)


def _split_glob(pattern: str) -> tuple[str, list[str]]:
    """Split a glob into the folder before its first component with a wildcard, and the components from there on."""
    components = pattern.split("/")
    first_wildcard_index = next(index for index, component in enumerate(components) if glob.has_magic(component))
    base_folder = "/".join(components[:first_wildcard_index])
    return base_folder or ("/" if pattern.startswith("/") else ""), [
        component for component in components[first_wildcard_index:] if component
    ]


def _path_components(path: str, base_folder: str) -> list[str]:
    return [component for component in path.removeprefix(base_folder).split("/") if component]


def _matches_glob(path_components: Sequence[str], pattern_components: Sequence[str]) -> bool:
    """Return whether a path matches a glob, both as lists of components. ** matches any number of folders."""
    if not pattern_components:
        return not path_components
    if pattern_components[0] == "**":
        if len(pattern_components) == 1:
            return bool(path_components)
        return any(_matches_glob(path_components[start:], pattern_components[1:]) for start in range(len(path_components)))
    return (
        bool(path_components)
        and fnmatchcase(path_components[0], pattern_components[0])
        and _matches_glob(path_components[1:], pattern_components[1:])
    )


def _includes_hidden_files(pattern_components: Sequence[str]) -> bool:
    """Return whether a glob includes hidden files, because one of its components starts with _ or a dot."""
    return any(component[0] in "_." for component in pattern_components)


def _is_skipped(path: str, *, base_folder: str) -> bool:
    """Return whether folders and globs skip `path`, because a component below `base_folder` is hidden."""
    return any(component[0] in "_." and component not in (".", "..") for component in _path_components(path, base_folder))


def retrying(call: Callable[[], T]) -> T:
    """Return the result of `call`, which is called up to three times if the network or the store fails temporarily."""
    retryer = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_temporary_error),
        stop=tenacity.stop_after_attempt(_MAX_CALLS),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=10),
        reraise=True,
    )
    return retryer(call)


def is_temporary_error(error: BaseException) -> bool:
    """Return whether a retry may succeed because the network failed or the store is overloaded."""
    return isinstance(error, ConnectionError | TimeoutError) or (
        isinstance(error, OSError) and bool(_TEMPORARY_ERROR_PATTERN.search(str(error)))
    )


def _explain_store_error(error: BaseException) -> str:
    """Return what the error of an object store means, with the first line of its message."""
    message = first_line(error)
    if isinstance(error, FileNotFoundError) or "NO_SUCH_BUCKET" in message or getattr(error, "errno", None) == errno.ENOENT:
        return f"no such bucket or folder ({message})"
    if "ACCESS_DENIED" in message or "INVALID_ACCESS_KEY" in message or "SIGNATURE" in message or "403" in message:
        return f"the store rejects the credentials from the environment; check them ({message})"
    return f"the store returns an error ({message})"
