"""From names to rules: what installed packages ship, and whatever else a user can point at.

A package ships rule sets and layout rules with entry points:

    [project.entry-points."fxrewrite.rules"]
    activations = "my_package.activations:ACTIVATIONS"

    [project.entry-points."fxrewrite.layouts"]
    my_package = "my_package.layouts:LAYOUTS"

What one package registers and cannot be loaded is an error for whoever asks for it by name, and a warning elsewhere.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any, Generic, TypeVar

from fxrewrite.errors import FxRewriteError, did_you_mean
from fxrewrite.plan import Plan, RuleSet
from fxrewrite.rule import Rule

T = TypeVar("T")
GROUP = "fxrewrite.rules"
"""The entry point group under which packages ship rule sets."""


class RegistryError(FxRewriteError):
    """A name leads to no rule set, rule or object; says what was tried and what there is."""


class RegistryWarning(UserWarning):
    """What a package registers cannot be loaded, and was left out."""


class Registry(Mapping[str, T], Generic[T]):
    """Registered name -> what a package ships under it, sorted by name; each is imported when it is requested.

    A broken entry point is an error of its own name only: its `registry[name]` raises, all others work.

    Args:
        entries: the entry points.
        kind: the type of what they lead to.
        what: what that is called in messages.
    """

    def __init__(self, entries: Iterable[EntryPoint], kind: type[T], what: str) -> None:
        self._kind, self._what = kind, what
        self._entries: dict[str, list[EntryPoint]] = defaultdict(list)
        for entry in sorted(entries, key=lambda entry: entry.name):
            self._entries[entry.name].append(entry)
        for same in self._entries.values():
            if len(same) > 1:  # a distribution's metadata are a file to parse
                same.sort(key=_distribution)

    def __getitem__(self, name: str) -> T:
        """What is registered under the name.

        Raises:
            KeyError: no package registers the name.
            RegistryError: two packages do, or its entry point is broken; names distribution, entry and exception.
        """
        if name not in self:
            raise KeyError(name)
        entry, *others = self._entries[name]
        if others:
            both = " and ".join(f"{_distribution(e)} ({e.value})" for e in (entry, *others))
            raise RegistryError(
                f"{self._what} {name!r} is registered twice, by {both}; uninstall one, or name its object"
            )
        try:
            found = entry.load()
        except Exception as error:
            raise self._broken(entry, raised_text(error)) from error
        if not isinstance(found, self._kind):
            raise self._broken(entry, f"expected a {self._kind.__name__}, found {_kind(found)}")
        return found

    def _broken(self, entry: EntryPoint, why: str) -> RegistryError:
        where = f"{self._what} {entry.name!r} of distribution {_distribution(entry)} ({entry.value})"
        return RegistryError(f"{where} is broken: {why}")

    def working(self) -> Iterator[tuple[str, T]]:
        """Each name whose entry point can be loaded, and what it leads to; the others are warned of."""
        for name in self:
            try:
                found = self[name]
            except RegistryError as error:
                warnings.warn(f"left out: {error}", RegistryWarning, stacklevel=2)
            else:
                yield name, found

    def of(self, distribution: str) -> Registry[T]:
        """What one distribution registers.

        Raises:
            RegistryError: that is nothing; names the distributions that do register something.
        """
        entries = [entry for entries in self._entries.values() for entry in entries]
        own = [entry for entry in entries if entry.dist is not None and _same(entry.dist.name, distribution)]
        if not own:
            others = sorted({entry.dist.name for entry in entries if entry.dist is not None})
            raise RegistryError(
                f"distribution {distribution!r} registers no {self._what}s; these do: {', '.join(others) or 'none'}; "
                "if it is yours, install it again, since entry points are read from what is installed"
            )
        return Registry(own, self._kind, self._what)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def distribution(self, name: str) -> str:
        """The package that registers the name, with its version; several are joined by a comma."""
        return ", ".join(map(_distribution, self._entries[name]))


def registered() -> Registry[RuleSet]:
    """The rule sets of all installed packages, by name; nothing is imported before it is requested."""
    return Registry(entry_points(group=GROUP), RuleSet, "rule set")


def load(path: str) -> RuleSet | Rule | Plan:
    """What a user means by `path`.

        activations               a registered rule set
        activations.silu          a rule of a registered set, by its id
        package.module:OBJECT     a Python object
        path/to/file.py:OBJECT    the same, from a file
        rules.toml                a rule file

    Raises:
        RegistryError: nothing is there, it is no rule set, rule or plan, or importing it raised.
        FxRewriteError: the rule file is wrong.
    """
    if path.endswith(".toml"):
        if not Path(path).is_file():
            raise RegistryError(f"there is no rule file {path}")
        from fxrewrite.rule_file import load_rules  # pydantic: a second that no other path needs

        return load_rules(Path(path))
    if ":" in path:
        found = find_object(path)
        if not isinstance(found, (RuleSet, Rule, Plan)):
            raise RegistryError(f"{path} is {_kind(found)}; expected a RuleSet, a Rule or a Plan")
        return found
    if path.endswith(".py"):
        raise RegistryError(f"{path}: say which object of the file, as in {path}:RULES")
    sets = registered()
    if path in sets:
        return sets[path]
    own = path.partition(".")[0]
    if own in sets:  # its own set says whether it is broken; those of others are passed over
        found = next((rule for rule in sets[own].rules() if rule.id == path), None)
        if found is not None:
            return found
    return _rule_of_any(sets, path)


def _rule_of_any(sets: Registry[RuleSet], path: str) -> Rule:
    known: dict[str, dict[int, tuple[str, Rule]]] = defaultdict(dict)
    broken: list[str] = []
    for name in sets:
        try:
            for rule in sets[name].rules():
                known[rule.id].setdefault(id(rule), (name, rule))
        except RegistryError:
            broken.append(name)
    found = list(known[path].values()) if path in known else []
    if len(found) == 1:
        return found[0][1]
    if found:
        names = " and ".join(name for name, _ in found)
        raise RegistryError(f"{path!r} is another rule in each of the sets {names}; name the object instead")
    close = difflib.get_close_matches(path, [*sets, *known], n=3)
    parts = [
        f"{path!r} is neither a registered rule set nor a rule of one",
        f"did you mean {' or '.join(map(repr, close))}?" if close else "",
        f"registered: {', '.join(sets)}" if sets else f"no package registers rule sets ({GROUP})",
        f"broken, so not searched: {', '.join(broken)}" if broken else "",
        "your own rules are named package.module:OBJECT, file.py:OBJECT or rules.toml",
    ]
    raise RegistryError("; ".join(filter(None, parts)))


def find_object(path: str) -> Any:
    """The object that "package.module:OBJECT" or "path/to/file.py:OBJECT" names; OBJECT may be dotted.

    A file that can be imported under its own name is; any other is imported as a module of its own.

    Raises:
        RegistryError: there is no such module, file or object, or importing it raised.
    """
    where, _, name = path.rpartition(":")
    if path.endswith(".py"):
        raise RegistryError(f"{path}: say which object of the file, as in {path}:NAME")
    if not where or not name:
        raise RegistryError(f"{path!r} names no object; write package.module:OBJECT or path/to/file.py:OBJECT")
    module = import_named(where)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = did_you_mean(part, [known for known in vars(module) if known[0] != "_"])
            raise RegistryError(f"{where} has no object {name!r}{near}")
        found = getattr(found, part)
    return found


def import_named(name: str) -> ModuleType:
    """The module "package.module" or "path/to/file.py", imported.

    Raises:
        RegistryError: there is none, or importing it raised.
    """
    return _import_file(Path(name)) if name.endswith(".py") else _import_module(name)


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise RegistryError(f"importing {name} failed: {raised_text(error)}") from error
        raise RegistryError(f"there is no module {error.name}, in the current folder or installed") from error
    except Exception as error:
        raise RegistryError(f"importing {name} failed: {raised_text(error)}") from error


def _import_file(path: Path) -> ModuleType:
    file = path.resolve()
    if not file.is_file():
        raise RegistryError(f"there is no file {path}")
    name = _module_name(file)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses and pickle look it up
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise RegistryError(f"importing {path} failed: {raised_text(error, file)}") from error
    return sys.modules[name]


def _module_name(file: Path) -> str:
    """The stem of the file, unless something else has that name already, or would when it is imported."""
    name = file.stem
    known = sys.modules.get(name)
    if known is None:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        origin = spec.origin if spec is not None else str(file)
    else:
        origin = getattr(known, "__file__", None)
    if origin == str(file):
        return name
    return f"{name}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"


def raised_text(error: BaseException, file: Path | None = None) -> str:
    """`ValueError: what it says (rules.py:12)`; the line is the last one in `file`, or else the last one there is."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    frames = [frame for frame in frames if file is not None and frame.filename == str(file)] or frames
    place = f" ({PurePath(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}".rstrip(": ") + ("" if isinstance(error, SyntaxError) else place)


def _same(name: str, other: str) -> bool:
    """Whether two names are those of one distribution, as package indices compare them."""
    return re.sub(r"[-_.]+", "-", name).lower() == re.sub(r"[-_.]+", "-", other).lower()


def _distribution(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "unknown"


def _kind(found: Any) -> str:
    return f"the {found.__name__} class" if isinstance(found, type) else f"of type {type(found).__name__}"
