"""A valid message of every kind that a connection takes, made from the types alone, and how to spoil one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect as types

TEXTS = ("a", "0-3:1#0", "1-a", "0-3:1", "step-00000001-1-1-1", "0123456789abcdef")
"""One of them is a text of any kind there is."""


def kinds(union: Any) -> list[type[msgspec.Struct]]:
    """The messages of a union."""
    found = types.type_info(union)
    members = found.types if isinstance(found, types.UnionType) else (found,)
    return [member.cls for member in members if isinstance(member, types.StructType)]


def sample(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A valid one, as JSON has it, with one element in each list."""
    found = _value(types.type_info(kind))
    assert isinstance(found, dict)
    return found


def _value(of: types.Type) -> Any:
    match of:
        case types.StructType():
            values = {field.encode_name: _field(of.cls, field) for field in of.fields}
            if of.array_like:
                return list(values.values())
            return values if of.tag is None else {of.tag_field: of.tag, **values}
        case types.UnionType():
            return _value(of.types[0])
        case types.ListType() | types.VarTupleType():
            return [_value(of.item_type)]
        case types.TupleType():
            return [_value(each) for each in of.item_types]
        case types.DictType():
            return {str(_value(of.key_type)): _value(of.value_type)}
        case types.IntType():
            return 1
        case types.FloatType():
            return 1.5
        case types.BoolType():
            return True
        case types.BytesType():
            return "AAAA"
        case types.StrType():
            return next(text for text in TEXTS if _fits(of, text))
        case types.LiteralType():
            return of.values[0]
        case types.EnumType():
            return next(iter(of.cls)).value
        case types.NoneType():
            return None
        case types.RawType():
            return {}
    raise NotImplementedError(of)


def _fits(of: types.StrType, text: str) -> bool:
    meta = msgspec.Meta(pattern=of.pattern, min_length=of.min_length, max_length=of.max_length)
    try:
        msgspec.convert(text, _annotated(meta))
    except msgspec.ValidationError:
        return False
    return True


def _annotated(meta: msgspec.Meta) -> Any:
    from typing import Annotated

    return Annotated[str, meta]


def _field(cls: type[msgspec.Struct], field: types.Field) -> Any:
    """Texts of groups and series are checked by the message as a whole."""
    value = _value(field.type)
    if cls.__dict__.get("__post_init__") is None:
        return value
    if isinstance(value, dict):
        return {"0-3:1#0": next(iter(value.values()))} if "a" in value else value
    if value == ["a"]:
        return ["0-3:1#0"]
    return "0-3:1#0" if field.name in ("group", "name") and value == "a" else value


def spoiled(valid: dict[str, Any], name: str, value: Any) -> Iterator[bytes]:
    """What is hardly a message any more: with another value, more or less in it, or cut off."""
    for field in valid:
        yield _bytes({**valid, field: value})
        yield _bytes({key: kept for key, kept in valid.items() if key != field})
        yield _bytes({**valid, field: [valid[field]]})
        # Twice, the second time wrong: what comes last counts.
        yield _bytes(valid)[:-1] + b"," + _bytes({field: value})[1:]
    yield _bytes({**valid, name: value})
    yield _bytes([valid, value])
    yield _bytes({**valid, "type": name})
    whole = _bytes(valid)
    yield whole[: len(whole) // 2]
    yield whole + whole


def _bytes(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
