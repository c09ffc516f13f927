"""Nested values as JSON, with the tensors in them taken out: what `state_dict` returns, without pickle.

What JSON cannot say is a mapping with the key "$", which names its kind: {"$": "tuple", "of": [1, 2]}.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy
import torch

from lowtide.errors import BadArgument

Tensors = dict[str, torch.Tensor]


def encode(value: object, name: str, tensors: Tensors) -> Any:
    """Return `value` as JSON; the tensors in it go to `tensors`, under names that begin with `name`."""
    if value is None or isinstance(value, bool | int | float | str):
        return _plain(value)
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return {"$": "tensor", "of": name}
    if isinstance(value, dict):
        return _encode_mapping(value, name, tensors)
    if isinstance(value, list | tuple | set | frozenset | deque) and not isinstance(value, torch.Size):
        items = [encode(item, _join(name, index), tensors) for index, item in enumerate(value)]
        return items if type(value) is list else {"$": _kind_of(value, name), "of": items}
    for kind, (types, to_json, _) in _LEAVES.items():
        if isinstance(value, types):
            return {"$": kind, "of": to_json(value)}
    raise _unknown(value, name)


def decode(coded: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Return what `encode` was given; `tensor` makes the tensor of a name."""
    if isinstance(coded, list):
        return [decode(item, tensor) for item in coded]
    if not isinstance(coded, dict):
        return coded
    if "$" not in coded:
        return {key: decode(item, tensor) for key, item in coded.items()}
    kind, of = coded["$"], coded["of"]
    if kind == "tensor":
        return tensor(of)
    if kind in _MAPPINGS:
        pairs = [(decode(key, tensor), decode(item, tensor)) for key, item in of]
        return _MAPPINGS[kind](pairs)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([decode(item, tensor) for item in of])
    _, _, from_json = _LEAVES[kind]
    return from_json(of)


def tensor_names(coded: Any) -> list[str]:
    """Return the names of the tensors in what `encode` returned, in its order."""
    if isinstance(coded, list):
        return [name for item in coded for name in tensor_names(item)]
    if not isinstance(coded, dict):
        return []
    if coded.get("$") == "tensor":
        return [coded["of"]]
    return [name for item in coded.values() for name in tensor_names(item)]


def _join(name: str, key: object) -> str:
    return f"{name}/{key}" if name else str(key)


def _plain(value: Any) -> Any:
    # numpy's numbers are Python's as well, and enums may be: what comes back must be what was given.
    if type(value) in (bool, int, float, str, type(None)):
        return value
    return {"$": "numpy", "of": _array_to_json(value)} if isinstance(value, numpy.generic) else value


def _encode_mapping(value: dict[Any, Any], name: str, tensors: Tensors) -> Any:
    kind = _kind_of(value, name)
    if kind == "dict" and all(type(key) is str and key != "$" for key in value):
        return {key: encode(item, _join(name, key), tensors) for key, item in value.items()}
    pairs = [
        [encode(key, _join(name, "key"), tensors), encode(item, _join(name, key), tensors)]
        for key, item in value.items()
    ]
    return {"$": kind, "of": pairs}


def _kind_of(value: object, name: str) -> str:
    kind = type(value).__name__
    known = _MAPPINGS if isinstance(value, dict) else _SEQUENCES
    if kind not in known or type(value) is not _TYPES[kind]:
        raise _unknown(value, name)
    return kind


def _unknown(value: object, name: str) -> BadArgument:
    return BadArgument(
        f"'{name}' is a {type(value).__name__}, which a checkpoint does not hold: pass numbers, texts, tensors, "
        "arrays, lists and mappings of them, or an object with state_dict() and load_state_dict()"
    )


def _array_to_json(value: Any) -> Any:
    array = numpy.ascontiguousarray(value)
    if array.dtype.hasobject:
        raise BadArgument("a checkpoint cannot hold an array of Python objects: convert it to a list")
    shape = list(numpy.shape(value))
    return [array.dtype.str, shape, base64.b64encode(array.tobytes()).decode(), isinstance(value, numpy.generic)]


def _array_from_json(of: Any) -> Any:
    dtype, shape, data, scalar = of
    array = numpy.frombuffer(base64.b64decode(data), dtype=dtype).reshape(shape).copy()
    return array[()] if scalar else array


_TYPES: dict[str, type] = {
    each.__name__: each for each in (dict, OrderedDict, defaultdict, Counter, list, tuple, set, frozenset, deque)
}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    # What it makes of missing keys is its owner's: load_state_dict reads, and does not ask for more.
    "defaultdict": dict,
    "Counter": lambda pairs: Counter(dict(pairs)),
}
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_LEAVES: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytes": ((bytes, bytearray), lambda v: base64.b64encode(v).decode(), base64.b64decode),
    "numpy": ((numpy.ndarray, numpy.generic), _array_to_json, _array_from_json),
    "complex": (complex, lambda v: [v.real, v.imag], lambda of: complex(*of)),
    "dtype": (torch.dtype, lambda v: str(v).removeprefix("torch."), lambda of: getattr(torch, of)),
    "device": (torch.device, str, torch.device),
    "size": (torch.Size, list, torch.Size),
}
