"""Recorder: runs a forward once on tensors without values, and writes the tape of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import get_ident
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from workbench.engine.cost import DrawnError, Meter
from workbench.engine.dropout import kind_of
from workbench.engine.nest import Ref, State, filled, signature, template, tensors
from workbench.engine.probe import probed
from workbench.engine.refusal import UnrecordableError, refused
from workbench.engine.skeleton import faked
from workbench.engine.tape import INPUT, Node, Tape, Value
from workbench.engine.units import Stages, given_names, opened
from workbench.errors import LayoutError, RecipeError

LOOKS = {Tensor.numpy, Tensor.__array__}  # which fake tensors only say is not supported
# Its effect is part of each node (`grad`); the same set again at replay would outlast the node.
SKIPPED = {torch._C._set_grad_enabled}
# Numbers that shapes alone decide are computed, so that a forward may look at them: positions that
# tell whether a mask is needed. Others are not, since they may be filled with what is not known.
COUNTS = {torch.arange, torch.linspace}
PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, type)


def record(
    bones: nn.Module,
    inputs: Any,
    *,
    device: torch.device,
    training: bool = True,
    precision_dtype: torch.dtype | None = None,
    stages: Stages | None = None,
) -> Tape:
    """The tape of bones(inputs), or of the submodules that stages gives called one after another.

    Nothing of the skeleton changes and no random number is drawn.

    Raises LayoutError where the forward depends on values.
    """
    with faked(bones, device) as (model, mode), mode, _untouched_random():
        model.train(training)
        _without_caches(model)
        names = given_names(model, stages) if stages else None
        recorder = _Recorder(model, device, names)
        fakes = recorder.take_inputs(inputs, device)
        precision = torch.autocast(device.type, precision_dtype) if precision_dtype else None
        try:
            with torch.enable_grad(), precision or nullcontext(), recorder.recording():
                recorder.finish(_called(model, names, fakes))
        except (LayoutError, RecipeError):
            raise
        except Exception as error:
            raise refused(error, model) from error
    return recorder.tape


def _called(model: nn.Module, names: list[str] | None, value: Any) -> Any:
    if names is None:
        return model(value)
    for name in names:
        value = model.get_submodule(name)(value)
    return value


class _Recorder(TorchFunctionMode):
    """Writes the tape while the forward of a copy of the model runs."""

    def __init__(self, model: nn.Module, device: torch.device, given: list[str] | None) -> None:
        super().__init__()
        self.tape = Tape(device_type=device.type)
        self.model, self.meter = model, Meter()
        self.known: dict[int, Ref | State] = {}
        self.made: list[Tensor] = []  # by slot
        self.alive: list[Any] = []  # or a tensor's id may be used again
        self.storages: dict[int, int] = {}
        self.inside = False
        self.reads: set[int] = set()
        self.state: set[str] = set()
        self.dropped: list[str] = []
        self.open = opened(model) if given is None else set()
        self.names: dict[nn.Module, str] = {}
        for name, module in model.named_modules():
            if (module not in self.open) if given is None else (name in given):
                self.names[module] = name
            if kind_of(module) is not None:
                module.register_forward_pre_hook(lambda *_, n=name: self.dropped.append(n))
        self.ambient = _autocast(device.type)
        self.before = _random_state(), _attributes(set(model.modules()))
        self._take_state()

    def _take_state(self) -> None:
        for kind in ("parameters", "buffers"):
            for name, tensor in getattr(self.model, f"named_{kind}")():
                self.known[id(tensor)] = State(name)
                self.alive.append(tensor)
                self.tape.storages[name] = self._storage(tensor)
                (self.tape.params if kind == "parameters" else self.tape.buffers).append(name)

    def take_inputs(self, inputs: Any, device: torch.device) -> Any:
        """The inputs without their values; their tensors become the first values of the tape."""
        self.tape.signature = signature(inputs)
        fakes = []
        for tensor in tensors(inputs):
            fakes.append(torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
            self.tape.inputs.append(self._value(fakes[-1]))
        queue = iter(fakes)
        return filled(template(inputs, lambda _: next(queue)))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While it is entered, calls are recorded."""
        self.ambient = _autocast(self.tape.device_type)
        for module in self.names:
            _watch(module, self)
        plain = torch.autograd.Function.__dict__["apply"]
        recorder, thread = self, get_ident()

        def apply(kind, *args, **kwargs):
            call = plain.__get__(None, kind)
            if recorder.inside or get_ident() != thread:
                return call(*args, **kwargs)
            return recorder.call(call, args, kwargs)

        # What is called in a Function is its own business, but no mode sees the call of itself.
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
        try:
            with self.meter, self:
                yield
        finally:
            torch.autograd.Function.apply = plain  # type: ignore[method-assign]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.inside or func in SKIPPED:
            return func(*args, **kwargs)
        if func is Tensor.__iter__:
            return iter(self.call(Tensor.unbind, args, kwargs))
        return self.call(func, args, kwargs)

    def call(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a function outside of the units and record it, unless it only asks for a property."""
        self.inside = True
        try:
            seen = list(tensors((args, kwargs)))
            known = func in COUNTS if not seen else not any(isinstance(t, FakeTensor) for t in seen)
            if func in LOOKS and not known:
                raise UnrecordableError("looks at values")
            watched = [(t, t._version) for t in seen]
            self.meter.clear()
            result = self._computed(func, args, kwargs) if known else func(*args, **kwargs)
            mutated = _mutated(watched, computed=known)
            if mutated or not _is_plain(result):
                arguments = self._template(args), self._template(kwargs)
                self._append(func, "", arguments, result, mutated)
            return result
        finally:
            self.inside = False

    def unit(self, module: nn.Module, call: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a unit as a whole and record it."""
        if self.inside:
            return call(*args, **kwargs)
        self.inside = True
        try:
            arguments = self._template(args), self._template(kwargs)
            held = list(_held(module))
            seen = [*tensors((args, kwargs)), *(t for _, _, t in held)]
            watched = [(t, t._version) for t in seen]
            self.meter.clear()
            with _untouched_random():
                drawn = _random_state()
                try:
                    result = call(*args, **kwargs)
                    mutated = _mutated(watched)
                    if _random_state() != drawn and "" not in self.tape.attributes:
                        self.tape.attributes.append("")
                except Exception as error:  # noqa: BLE001 - it may be for want of values
                    self.dropped.clear()
                    result, mutated = self._probed(module, call, (args, kwargs), error)
            for owner, key, tensor in held:
                name = self.known.get(id(tensor))
                if not isinstance(name, State):  # a buffer that an earlier call registered
                    continue
                self.state.add(name.name)
                if owner[key] is not tensor:
                    self.tape.changed.add(name.name)
                    self.known[id(owner[key])] = name
                    self.alive.append(owner[key])
            self._append(None, self.names[module], arguments, result, mutated)
            return result
        finally:
            self.inside = False

    def _probed(
        self, module: nn.Module, call: Callable, arguments: tuple[tuple, dict], error: Exception
    ) -> tuple[Any, list[Tensor]]:
        """What a unit returns and writes when it is called with made-up values."""
        args, kwargs = arguments
        try:
            return probed(module, call, args, kwargs)
        except Exception as second:  # noqa: BLE001 - the user's unit may raise anything
            says = (str(second).strip().splitlines() or [""])[0]
            what = f"cannot have {self.names[module]} run alone ({type(second).__name__}: {says})"
            raise UnrecordableError(what, parts_help=False) from error

    def _computed(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """The result with its values, unless it is random."""
        try:
            with unset_fake_temporarily(), self.meter.nothing_drawn():
                return func(*args, **kwargs)
        except DrawnError:
            return func(*args, **kwargs)

    def _append(self, func: Any, unit: str, arguments: tuple, result: Any, mutated: list) -> None:
        changed = frozenset(map(self._storage, mutated))
        self.tape.changed |= {n for n, place in self.tape.storages.items() if place in changed}
        args, kwargs = arguments
        grad, autocast = torch.is_grad_enabled(), _autocast(self.tape.device_type)
        node = Node(
            function=func,
            unit=unit,
            args=args,
            kwargs=kwargs,
            outs=tuple(map(self._value, tensors(result))),
            reads=frozenset(self.reads),
            state=frozenset(self.state),
            mutates=changed,
            cost=self.meter.cost,
            random=self.meter.random,
            grad=None if grad else False,
            autocast=None if autocast == self.ambient else autocast,
            dropped=tuple(self.dropped),
        )
        for slot in range(len(self.made)) if changed else self.reads:
            turns, takes = self.tape.values[slot].turns, self.made[slot].requires_grad
            if turns[-1][1] != takes:
                turns.append((len(self.tape.nodes), takes))
        self.reads, self.state, self.dropped = set(), set(), []
        self.tape.nodes.append(node)

    def finish(self, result: Any) -> None:
        """The forward has returned: note its output and the buffers it assigned anew."""
        self.inside = True
        self._check_python()
        self.tape.output = self._template(result)
        self.tape.returns = frozenset(self.reads)
        self.tape.returns_state = frozenset(self.state)
        for name in self.tape.buffers:
            path, _, key = name.rpartition(".")
            now = self.model.get_submodule(path)._buffers[key]
            if now is not None and isinstance(ref := self._template(now), Ref):
                self.tape.writes[name] = ref.slot
                self.tape.changed.add(name)

    def _check_python(self) -> None:
        """What a forward does to other things than tensors, which replay would not do again.

        Units do it again themselves: of them it is noted.
        """
        drawn, attributes = self.before
        if _random_state() != drawn:
            raise UnrecordableError("draws numbers from Python's or NumPy's random")
        after = _attributes(set(self.model.modules()))
        changed = [name for name, value in after.items() if attributes.get(name, value) != value]
        for module, key in changed:
            if module in self.open:
                raise UnrecordableError(f"changes self.{key}, a plain attribute")
        names = {module: name for name, module in self.model.named_modules()}
        self.tape.attributes += [f"{names[one]}.{key}".lstrip(".") for one, key in changed]

    def _template(self, value: Any) -> Any:
        return template(value, self._ref)

    def _ref(self, tensor: Tensor) -> Any:
        found = self.known.get(id(tensor))
        if isinstance(found, Ref):
            self.reads.add(found.slot)
        elif isinstance(found, State):
            self.state.add(found.name)
        elif isinstance(tensor, FakeTensor):
            raise UnrecordableError(
                "uses a tensor that a part kept to itself instead of returning it"
            )
        elif torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # pyright: ignore
            raise UnrecordableError("uses torch.func or torch.vmap between its parts")
        return tensor if found is None else found

    def _value(self, tensor: Tensor) -> int:
        found = self.known.get(id(tensor))
        if isinstance(found, Ref):
            return found.slot
        if isinstance(found, State):
            return INPUT
        slot = len(self.tape.values)
        self.known[id(tensor)] = Ref(slot)
        self.made.append(tensor)
        turns = [(len(self.tape.nodes) if self.inside else INPUT, tensor.requires_grad)]
        self.tape.values.append(Value(tensor.shape, tensor.dtype, self._storage(tensor), turns))
        return slot

    def _storage(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self.alive.append(storage)
        return self.storages.setdefault(storage._cdata, len(self.storages))


def _watch(module: nn.Module, recorder: _Recorder) -> None:
    """Calls of this module go to the recorder first, before any hook of its own."""
    kind = type(module)

    def call(self, *args, **kwargs):
        return recorder.unit(self, lambda *a, **k: kind.__call__(self, *a, **k), args, kwargs)

    names = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = type(kind.__name__, (kind,), names)


def _mutated(watched: list[tuple[Tensor, int]], *, computed: bool = False) -> list[Tensor]:
    """The tensors written since; one that has values must not be, unless by a computed call."""
    mutated = [tensor for tensor, version in watched if tensor._version != version]
    real = [tensor for tensor in mutated if not isinstance(tensor, FakeTensor)]
    if real and not computed:
        for tensor in real:
            tensor.detach_()  # its values are as they were; what it depends on is without any
        raise UnrecordableError("writes into a tensor that is neither a buffer nor made there")
    return mutated


def _held(module: nn.Module) -> Iterator[tuple[dict, str, Tensor]]:
    for part in module.modules():
        for owner in (part._parameters, part._buffers):
            for key, tensor in owner.items():
                if tensor is not None:
                    yield owner, key, tensor


def _autocast(device_type: str) -> tuple[str, bool, torch.dtype]:
    enabled = torch.is_autocast_enabled(device_type)
    return device_type, enabled, torch.get_autocast_dtype(device_type)


def _is_plain(result: Any) -> bool:
    if isinstance(result, (tuple, list)):
        return all(map(_is_plain, result))
    return isinstance(result, PLAIN)


def _without_caches(model: nn.Module) -> None:
    # The keys and values that Hugging Face models keep for generation are objects which every
    # block writes to; a training has no use for them.
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False  # type: ignore[union-attr]


def _random_state() -> tuple[Any, ...]:
    kind, keys, *rest = cast(tuple, np.random.get_state())
    return random.getstate(), kind, keys.tobytes(), *rest


@contextmanager
def _untouched_random() -> Iterator[None]:
    before = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _attributes(modules: set[nn.Module]) -> dict[tuple[nn.Module, str], Any]:
    return {
        (module, key): value
        for module in modules
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str))
    }
