"""From an OmegaConf tree to the frozen dataclasses: strict about keys and types; each fault names its full path."""

import math
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import get_args, get_origin

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from rlhf.config.checks import Faults, collecting
from rlhf.config.schema import NO_VALUE, default_tree, field_docs, field_types, type_name

FAULTY = object()  # stands for a value whose fault has been noted
STAND_INS: dict[type, object] = {str: "", int: 1, float: 1.0, bool: False, tuple: (), dict: {}}

EXAMPLES = {str: "TEXT", int: "1", float: "0.1", bool: "true", tuple: "[1,2]", dict: "{key: value}"}


class Converter:
    """Converts one tree and notes each thing that is wrong; a faulty value is replaced, so that all rules are asked.

    Args:
        unknown: Message for the dotted path of an unknown key.
        faults: Takes what is found.
    """

    def __init__(self, unknown: Callable[[str], str], faults: Faults) -> None:
        self._faults = faults
        self._unknown = unknown

    def section(self, cls: type, node: DictConfig, path: str) -> object:
        """A dataclass from a section; where a value has a fault, its default or a stand-in is in its place."""
        kinds, docs = field_types(cls), field_docs(cls)
        defaults = OmegaConf.create(default_tree(cls))
        for key in node:
            if key not in kinds:
                for leaf in _leaves(node._get_node(key), _join(path, str(key))):
                    self._faults.add(self._unknown(leaf))
        values = {}
        for field in fields(cls):
            where = _join(path, field.name)
            source = node if field.name in list(node) else defaults
            value = self._read(source, field.name, where, kinds[field.name], docs.get(field.name, ""))
            if isinstance(value, bool) and (words := self._words(cls, field.name, shown(value))):
                value = self._fault(no_word(where, value, words))
            converted = value if value is FAULTY else self.value(kinds[field.name], value, where)
            values[field.name] = self._stand_in(field, kinds[field.name]) if converted is FAULTY else converted
        with collecting() as broken:
            made = cls(**values)
        for fault in broken.found:
            self._faults.add_rule(full_path(fault.message, cls, path))
        return made

    def value(self, kind: type, value: object, where: str) -> object:
        """A field's value in its declared type; FAULTY when it does not fit."""
        if is_dataclass(kind):
            if isinstance(value, DictConfig):
                return self.section(kind, value, where)
            names = ", ".join(field_types(kind))
            return self._fault(f"{where}: {shown(value)} given; needs a section with keys {names}; change it")
        if get_origin(kind) is tuple:
            return self._list(get_args(kind)[0], value, where)
        if get_origin(kind) is dict:
            return self._mapping(value, where)
        converted = SCALARS[kind](value)
        if converted is None:
            return self._fault(wrong_type(where, value, kind))
        return converted

    def _read(self, node: DictConfig, name: str, where: str, kind: type, doc: str) -> object:
        try:
            value = node[name] if not OmegaConf.is_missing(node, name) else NO_VALUE
        except InterpolationToMissingValueError:
            self._faults.doubt(where)
            return FAULTY  # the key it points to is reported
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            return self._fault(f"{where}: {reason}; needs a value that resolves; change it")
        if value == NO_VALUE:
            example = EXAMPLES[get_origin(kind) or kind]
            return self._fault(f"{where}: missing; needs {type_name(kind)}: {doc} Set {where}={example}")
        return value

    def _list(self, kind: type, value: object, where: str) -> object:
        if not isinstance(value, ListConfig):
            return self._fault(
                f"{where}: {shown(value)} given; needs a list of {type_name(kind)}s; write {where}=[{EXAMPLES[kind]}]"
            )
        items = [self.value(kind, item, f"{where}[{i}]") for i, item in enumerate(value)]
        return FAULTY if any(item is FAULTY for item in items) else tuple(items)

    def _mapping(self, value: object, where: str) -> object:
        if not isinstance(value, DictConfig):
            return self._fault(f"{where}: {shown(value)} given; needs a mapping; write {where}={EXAMPLES[dict]!r}")
        try:
            found = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            return self._fault(f"{where}: {str(error).splitlines()[0]}; needs values that resolve; change it")
        assert isinstance(found, dict), "a DictConfig holds a dict"
        if odd := [key for key in found if not isinstance(key, str)]:
            return self._fault(f"{where}: key {odd[0]!r} given; needs text keys; quote it")
        return found

    def _fault(self, message: str) -> object:
        self._faults.add(message)
        return FAULTY

    def _stand_in(self, field: Field, kind: type) -> object:
        """The default, or any value of the type."""
        with collecting():
            if field.default is not MISSING:
                return field.default
            if field.default_factory is not MISSING:
                return field.default_factory()
        if is_dataclass(kind):
            return self._empty_section(kind)
        return STAND_INS[get_origin(kind) or kind]

    def _words(self, cls: type, name: str, text: str) -> str:
        """What the rules of a section say of a text that one field must be one of; nothing for any other field."""
        kinds = field_types(cls)
        if kinds[name] is not str:
            return ""
        values = {one.name: self._stand_in(one, kinds[one.name]) for one in fields(cls)}
        with collecting() as broken:
            cls(**{**values, name: text})
        found = [re.search(rf"\b{name}: '{text}' given; needs one of ([^;]+);", one.message) for one in broken.found]
        return next((one[1] for one in found if one), "")

    def _empty_section(self, cls: type) -> object:
        kinds = field_types(cls)
        with collecting():
            return cls(**{one.name: self._stand_in(one, kinds[one.name]) for one in fields(cls)})


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _leaves(node: object, path: str) -> list[str]:
    """Paths of everything that lies under an unknown key, so that a misspelt section shows the keys it was to hold."""
    if not isinstance(node, DictConfig) or node._is_interpolation() or not node:
        return [path]
    return [leaf for key in node for leaf in _leaves(node._get_node(key), _join(path, str(key)))]


def shown(value: object) -> str:
    """A value as it is quoted in a message."""
    if isinstance(value, DictConfig | ListConfig):
        value = OmegaConf.to_container(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _bool(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _float(value: object) -> float | None:
    if isinstance(value, str):  # quoted, or put together by an interpolation
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _int(value: object) -> int | None:
    number = _float(value)
    if number is None or not number.is_integer():
        return None
    return value if isinstance(value, int) else int(number)


SCALARS: dict[type, Callable[[object], object]] = {str: _text, bool: _bool, int: _int, float: _float}


def wrong_type(where: str, value: object, kind: type) -> str:
    """Message for a scalar of the wrong type."""
    needed = {str: "text", int: "a whole number", float: "a finite number", bool: "true or false"}[kind]
    cure = "change it"
    if kind is str and isinstance(value, bool | int | float):
        cure = f"put quotes inside the value, such as {where}='\"{shown(value)}\"', or in the file {shown(value)!r}"
    elif value is None:
        cure = "give a value, or remove the key to get the default"
    return f"{where}: {shown(value)} given; needs {needed}; {cure}"


def no_word(where: str, value: bool, words: str) -> str:
    """Message for a word that YAML takes for a truth value."""
    likes = "on, yes and true" if value else "off, no and false"
    return f"{where}: {shown(value)} given (YAML reads {likes} so); needs one of {words}; write {where}=WORD"


def full_path(message: str, cls: type, path: str) -> str:
    """Make the short names in a rule's message full: `optim.lr: ...` at actor.optim becomes `actor.optim.lr: ...`.

    A rule speaks of its own section by that section's name or by bare field names, and of sections below it by theirs.
    """
    if not path:
        return message
    kinds = field_types(cls)
    own = path.rpartition(".")[2]
    here = "|".join(map(re.escape, kinds))
    below = "|".join(re.escape(name) for name, kind in kinds.items() if is_dataclass(kind))
    patterns = [(rf"(?<![\w.]){re.escape(own)}\.(?=({here})\b)", f"{path}.")]
    if below:
        patterns.append((rf"(?<![\w.])(?=({below})\.\w)", f"{path}."))
    patterns.append((rf"(?:(?<=set )|^)(?=({here})\b[:=])", f"{path}."))
    for pattern, replacement in patterns:
        message = re.sub(pattern, replacement, message)
    return message
