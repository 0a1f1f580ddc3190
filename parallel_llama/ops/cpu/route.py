"""Routing of tokens to experts; each kernel replaces about a dozen torch operations."""

from dataclasses import dataclass
from functools import cache, partial
from math import inf, nan
from operator import add
from typing import Generic

import torch
from llvmlite import ir
from torch import Tensor

from parallel_llama.ops.cpu.arguments import Float64, Integer, Integers, Numbers, T
from parallel_llama.ops.cpu.ir import Lanes, Thread, Value, Variable, larger, loop, where
from parallel_llama.ops.cpu.jit import (
    CompiledKernel,
    CPUFeatures,
    Launcher,
    at_once,
    this_machine,
    threads_for,
)
from parallel_llama.ops.cpu.vector_math import exp, sigmoid
from parallel_llama.ops.dispatch import Dispatch


@dataclass(slots=True, kw_only=True)
class _RouteArguments(Generic[T]):
    scores: Numbers[T]
    routing_weights: Numbers[T]
    experts: Integers[T]
    n: Integer[T]
    n_experts: Integer[T]
    n_active: Integer[T]
    normed: Integer[T]


@dataclass(slots=True, kw_only=True)
class _SigmoidRouteArguments(Generic[T]):
    scores: Numbers[T]
    bias: Numbers[T]
    choices: Numbers[T]
    of_groups: Numbers[T]
    routing_weights: Numbers[T]
    experts: Integers[T]
    n: Integer[T]
    n_experts: Integer[T]
    n_active: Integer[T]
    n_groups: Integer[T]
    n_active_groups: Integer[T]
    has_bias: Integer[T]
    normed: Integer[T]
    scale: Float64[T]


@dataclass(slots=True, kw_only=True)
class _DispatchArguments(Generic[T]):
    experts: Integers[T]
    tokens: Integers[T]
    order: Integers[T]
    pairs: Integers[T]
    starts: Integers[T]
    following: Integers[T]
    n_pairs: Integer[T]
    n_active: Integer[T]
    first: Integer[T]
    n: Integer[T]


class RouteKernel:
    """The best experts of each row, in order, and their routing weights: see `TorchOps.route`.

    It overwrites the scores. If a row contains NaN, all its weights are NaN.

    Shapes: scores [T, n_experts], contiguous -> weights and experts [T, n_active].
    """

    def __init__(self, dtype: torch.dtype, machine: CPUFeatures) -> None:
        lanes = machine.lanes(dtype)
        self._program = CompiledKernel(
            _RouteArguments[float], partial(_route, lanes), numbers=lanes.pointer
        )

    def __call__(
        self, scores: Tensor, n_active: int, *, normed: bool, run: Launcher = at_once
    ) -> tuple[Tensor, Tensor]:
        n, n_experts = scores.shape
        assert scores.is_contiguous() and n_active <= n_experts
        routing_weights = scores.new_empty(n, n_active)
        experts = scores.new_empty(n, n_active, dtype=torch.int64)
        arguments = _RouteArguments(
            scores=scores.data_ptr(), routing_weights=routing_weights.data_ptr(),
            experts=experts.data_ptr(), n=n, n_experts=n_experts, n_active=n_active, normed=normed,
        )  # fmt: skip
        run(self._program, threads_for(n * n_experts * n_active), arguments)
        return routing_weights, experts


class SigmoidRouteKernel:
    """The best experts of each row, and their routing weights: see `TorchOps.sigmoid_route`.

    It overwrites the scores. torch's sigmoid is not used: its result for a number depends on the
    number's index in the tensor, so a token's weights would depend on the other tokens.

    Shapes: scores [T, n_experts] and bias [n_experts], contiguous -> weights and experts
        [T, n_active].
    """

    def __init__(self, dtype: torch.dtype, machine: CPUFeatures) -> None:
        lanes = machine.lanes(dtype)
        self._program = CompiledKernel(
            _SigmoidRouteArguments[float], partial(_sigmoid_route, lanes), numbers=lanes.pointer
        )

    def __call__(
        self,
        scores: Tensor,
        bias: Tensor | None,
        n_active: int,
        groups: tuple[int, int],
        scale: float,
        *,
        normed: bool,
        run: Launcher = at_once,
    ) -> tuple[Tensor, Tensor]:
        n, n_experts = scores.shape
        assert scores.is_contiguous() and n_active <= n_experts
        if bias is not None:
            assert bias.is_contiguous() and bias.shape == (n_experts,)
            assert bias.dtype == scores.dtype
        n_groups, n_active_groups = groups if groups[0] > 1 else (0, 0)
        routing_weights, choices = scores.new_empty(n, n_active), scores.new_empty(n, n_experts)
        of_groups = scores.new_empty(n, n_groups)
        experts = scores.new_empty(n, n_active, dtype=torch.int64)
        arguments = _SigmoidRouteArguments(
            scores=scores.data_ptr(), bias=(scores if bias is None else bias).data_ptr(),
            choices=choices.data_ptr(), of_groups=of_groups.data_ptr(),
            routing_weights=routing_weights.data_ptr(), experts=experts.data_ptr(), n=n,
            n_experts=n_experts, n_active=n_active, n_groups=n_groups,
            n_active_groups=n_active_groups, has_bias=bias is not None, normed=normed, scale=scale,
        )  # fmt: skip
        run(self._program, threads_for(n * n_experts * n_active), arguments)
        return routing_weights, experts


class ExpertDispatchKernel:
    """The rows of each expert: see `TorchOps.expert_dispatch`."""

    def __init__(self) -> None:
        self._program = CompiledKernel(_DispatchArguments[float], _expert_dispatch)

    def __call__(
        self, experts: Tensor, local_experts: range, run: Launcher = at_once
    ) -> tuple[Dispatch, Dispatch]:
        n_active = experts.shape[1]
        assert experts.is_contiguous() and experts.dtype == torch.int64
        tokens, order, pairs = experts.new_empty(3, experts.numel())
        starts, following = experts.new_empty(2, len(local_experts) + 1)
        arguments = _DispatchArguments(
            experts=experts.data_ptr(), tokens=tokens.data_ptr(), order=order.data_ptr(),
            pairs=pairs.data_ptr(), starts=starts.data_ptr(), following=following.data_ptr(),
            n_pairs=experts.numel(), n_active=n_active, first=local_experts.start,
            n=len(local_experts),
        )  # fmt: skip
        run(self._program, 1, arguments)
        max_rows = len(experts)
        return Dispatch(tokens, order, starts, max_rows), Dispatch(order, pairs, starts, max_rows)


@cache
def make_route(dtype: torch.dtype) -> RouteKernel:
    return RouteKernel(dtype, this_machine())


@cache
def make_sigmoid_route(dtype: torch.dtype) -> SigmoidRouteKernel:
    return SigmoidRouteKernel(dtype, this_machine())


@cache
def make_expert_dispatch() -> ExpertDispatchKernel:
    return ExpertDispatchKernel()


def _route(lanes: Lanes, b: ir.IRBuilder, thread: Thread, args: _RouteArguments[Value]) -> None:
    """
    for row in this thread's rows:
        total = sum(exp(scores[row] - max(scores[row])))
        for i in n_active:
            experts[row, i] = argmax(scores[row]), which is then excluded
            routing_weights[row, i] = exp(that score - max(scores[row])) / total
        routing_weights[row] /= sum(routing_weights[row]) if normed
    """
    n_experts, n_active = args.n_experts, args.n_active
    with loop(b, *thread.part_of(args.n)) as row:
        row_scores, row_weights = (
            args.scores + row * n_experts,
            args.routing_weights + row * n_active,
        )
        best, total = _softmax(lanes, row_scores, n_experts)
        total_weight = Variable(row_scores[0].like(0))
        with loop(b, 0, n_active) as choice:
            expert, score = _argmax(row_scores, n_experts)
            (args.experts + row * n_active)[choice] = expert
            row_scores[expert] = score.like(nan)  # comparisons with NaN are false
            weight = exp(lanes, lanes.splat(score - best)).lane(0) / total
            row_weights[choice] = weight
            total_weight.value += weight
        divisor = where(args.normed > 0, total_weight.value, total_weight.value.like(1))
        with loop(b, 0, n_active) as choice:
            row_weights[choice] = row_weights[choice] / divisor


def _sigmoid_route(
    lanes: Lanes, b: ir.IRBuilder, thread: Thread, args: _SigmoidRouteArguments[Value]
) -> None:
    """
    for row in this thread's rows:
        choices[row] = sigmoid(scores[row]) + bias if has_bias else scores[row]
        scores[row] = sigmoid(scores[row])
        choices[row] of groups that are not among the n_active_groups best are excluded
        for i in n_active:
            experts[row, i] = argmax(choices[row]), which is then excluded
            routing_weights[row, i] = scores[row, that expert]
        routing_weights[row] /= sum(routing_weights[row]) + 1e-20 if normed
        routing_weights[row] *= scale
    """
    n_experts, n_active = args.n_experts, args.n_active
    scale = args.scale.to(lanes.vector.element)
    with loop(b, *thread.part_of(args.n)) as row:
        row_scores, choices = args.scores + row * n_experts, args.choices + row * n_experts
        row_weights = args.routing_weights + row * n_active
        with loop(b, 0, n_experts, lanes.width) as i:
            mask = lanes.first(n_experts - i)
            score = lanes.load(row_scores + i, mask)
            weights = sigmoid(lanes, score)
            biased = weights + lanes.load(args.bias + i, mask)
            lanes.store(choices + i, where(args.has_bias > 0, biased, score), mask)
            lanes.store(row_scores + i, weights, mask)
        _exclude_groups(args, choices, args.of_groups + row * args.n_groups)
        total_weight = Variable(row_scores[0].like(0))
        with loop(b, 0, n_active) as choice:
            expert, _ = _argmax(choices, n_experts)
            (args.experts + row * n_active)[choice] = expert
            choices[expert] = total_weight.value.like(nan)  # comparisons with NaN are false
            row_weights[choice] = row_scores[expert]
            total_weight.value += row_scores[expert]
        divisor = where(args.normed > 0, total_weight.value + 1e-20, total_weight.value.like(1))
        with loop(b, 0, n_active) as choice:
            row_weights[choice] = row_weights[choice] / divisor * scale


def _exclude_groups(args: _SigmoidRouteArguments[Value], choices: Value, of_groups: Value) -> None:
    """
    for g in n_groups:
        of_groups[g] = the sum of the two largest choices of group g
    choices of the groups that are not among the n_active_groups best become NaN
    """
    b, n_groups = args.n.b, args.n_groups
    size = args.n_experts // larger(n_groups, n_groups.like(1))
    with loop(b, 0, n_groups) as g:
        group_choices = choices + g * size
        number, largest = _argmax(group_choices, size)
        group_choices[number] = largest.like(nan)
        _, second = _argmax(group_choices, size)
        group_choices[number] = largest
        of_groups[g] = largest + second
    with loop(b, 0, args.n_active_groups):
        number, best = _argmax(of_groups, n_groups)
        of_groups[number] = best.like(nan)
    with loop(b, 0, n_groups) as g:
        is_out = of_groups[g] < inf  # false for NaN, which marks the best groups
        with loop(b, g * size, (g + 1) * size) as i:
            choices[i] = where(is_out, choices[i].like(nan), choices[i])


def _softmax(lanes: Lanes, scores: Value, n: Value) -> tuple[Value, Value]:
    """The largest score, and the sum of exp(score - largest)."""
    b = n.b
    lowest = lanes.constant(b, -inf)
    best, total = Variable(lowest), Variable(lanes.constant(b, 0))
    with loop(b, 0, n, lanes.width) as i:
        mask = lanes.first(n - i)
        best.value = larger(best.value, where(mask, lanes.load(scores + i, mask), lowest))
    largest = lanes.reduce(larger, best.value)
    with loop(b, 0, n, lanes.width) as i:
        mask = lanes.first(n - i)
        e = exp(lanes, lanes.load(scores + i, mask) - lanes.splat(largest))
        total.value += where(mask, e, 0)
    return largest, lanes.reduce(add, total.value)


def _argmax(scores: Value, n: Value) -> tuple[Value, Value]:
    """The first index of the largest score, and this score; 0 and -inf if none is above -inf."""
    number, score = Variable(n.like(0)), Variable(scores[0].like(-inf))
    with loop(n.b, 0, n) as i:
        is_better = score.value < scores[i]
        number.value = where(is_better, i, number.value)
        score.value = where(is_better, scores[i], score.value)
    return number.value, score.value


def _expert_dispatch(b: ir.IRBuilder, _: Thread, args: _DispatchArguments[Value]) -> None:
    """Sorts the pairs of token and expert by expert, those of other ranks' experts last.

    starts[e], following[e] = number of pairs with an expert before e, for this rank's experts
    for pair in experts:
        i = following[its expert]++
        tokens[i], order[i], pairs[i] = pair // n_active, i, pair
    """
    following, n_pairs, n = args.following, args.n_pairs, args.n

    def index_of(pair: Value) -> Value:
        """The index of a pair's expert among this rank's; `n` if another rank has the expert."""
        number = args.experts[pair] - args.first
        return where(number < 0, n, where(number < n, number, n))

    with loop(b, 0, n + 1) as i:
        following[i] = n.like(0)
    with loop(b, 0, n_pairs) as pair:
        at = index_of(pair)
        following[at] = following[at] + 1
    n_before = Variable(n.like(0))
    with loop(b, 0, n + 1) as i:
        count, args.starts[i] = following[i], n_before.value
        following[i] = n_before.value
        n_before.value += count
    with loop(b, 0, n_pairs) as pair:
        at = index_of(pair)
        i = following[at]
        args.tokens[i], args.order[i], args.pairs[i] = pair // args.n_active, i, pair
        following[at] = i + 1
