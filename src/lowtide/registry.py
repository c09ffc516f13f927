"""Finds what users name: built-in and third-party parts, loaded only when asked for.

A package adds a policy with an entry point of the group `lowtide.policies` whose object is a policy, or a class or
function that returns one when called without arguments. A built-in name cannot be taken over.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from lowtide.core.spelling import bare, did_you_mean
from lowtide.errors import BadArgument
from lowtide.plan.policy import About, Policy

POLICY_GROUP = "lowtide.policies"

_BUILTIN_POLICIES = {
    "auto": "lowtide.plan.policies.auto:Auto",
    "belady": "lowtide.plan.policies.belady:Belady",
    "keep_all": "lowtide.plan.policies.keep_all:KeepAll",
    "lru": "lowtide.plan.policies.lru:Lru",
    "swap_all": "lowtide.plan.policies.swap_all:SwapAll",
    "dymem": "lowtide.plan.policies.dymem:Dymem",
    "layrub": "lowtide.plan.policies.layrub:Layrub",
    "modnn": "lowtide.plan.policies.modnn:Modnn",
    "superneurons": "lowtide.plan.policies.superneurons:SuperNeurons",
    "vdnn": "lowtide.plan.policies.vdnn:Vdnn",
    "vdnn_all": "lowtide.plan.policies.vdnn:VdnnAll",
    "vdnn_conv": "lowtide.plan.policies.vdnn:VdnnConv",
    "vdnn_dyn": "lowtide.plan.policies.vdnn:VdnnDyn",
    "vdnn_pp": "lowtide.plan.policies.vdnn_pp:VdnnPlusPlus",
    "accudnn": "lowtide.plan.policies.accudnn:AccUdnn",
    "fastswap": "lowtide.plan.policies.fastswap:Fastswap",
    "infiniswap": "lowtide.plan.policies.infiniswap:Infiniswap",
    "dtr": "lowtide.plan.policies.dtr:Dtr",
    "infinite_memory": "lowtide.plan.policies.infinite_memory:InfiniteMemory",
    "mindspore_gsm": "lowtide.plan.policies.mindspore:MindSporeGsm",
    "mindspore_mem_reuse": "lowtide.plan.policies.mindspore:MindSporeMemReuse",
    "mindspore_offload": "lowtide.plan.policies.mindspore:MindSporeOffload",
    "nnabla": "lowtide.plan.policies.nnabla:Nnabla",
    "pooch": "lowtide.plan.policies.pooch:Pooch",
    "survey1": "lowtide.plan.policies.survey:Survey1",
    "survey2": "lowtide.plan.policies.survey:Survey2",
    "survey3": "lowtide.plan.policies.survey:Survey3",
    "survey4": "lowtide.plan.policies.survey:Survey4",
    "swapadvisor": "lowtide.plan.policies.swapadvisor:SwapAdvisor",
    "autoswap": "lowtide.plan.policies.autoswap:AutoSwap",
    "capuchin": "lowtide.plan.policies.capuchin:Capuchin",
    "flashneuron": "lowtide.plan.policies.flashneuron:FlashNeuron",
    "li_chapman": "lowtide.plan.policies.li_chapman:LiChapman",
    "meng": "lowtide.plan.policies.meng:Meng",
    "tflms": "lowtide.plan.policies.tflms:Tflms",
    "unified_memory": "lowtide.plan.policies.unified_memory:UnifiedMemory",
    "unified_memory_hints": "lowtide.plan.policies.unified_memory:UnifiedMemoryHints",
    "autotm": "lowtide.plan.policies.autotm:AutoTm",
    "autotm_async": "lowtide.plan.policies.autotm:AutoTmAsynchronous",
    "autotm_static": "lowtide.plan.policies.autotm:AutoTmStatic",
    "activation_budget": "lowtide.plan.policies.activation_budget:ActivationBudget",
    "layer_budgets": "lowtide.plan.policies.layer_budgets:LayerBudgets",
    "checkmate": "lowtide.plan.policies.checkmate:Checkmate",
    "checkmate_lp": "lowtide.plan.policies.checkmate:CheckmateLp",
    "poet": "lowtide.plan.policies.poet:Poet",
    "offmate": "lowtide.plan.policies.offmate:OffMate",
    "chen_greedy": "lowtide.plan.policies.chen:ChenGreedy",
    "chen_sqrt": "lowtide.plan.policies.chen:ChenSqrt",
    "echo": "lowtide.plan.policies.echo:Echo",
    "gruslys": "lowtide.plan.policies.gruslys:Gruslys",
    "kusumoto": "lowtide.plan.policies.kusumoto:Kusumoto",
    "bandwidth_aware": "lowtide.plan.policies.bandwidth_aware:BandwidthAware",
    "cori": "lowtide.plan.policies.cori:Cori",
    "deeptm": "lowtide.plan.policies.deeptm:DeepTm",
    "first_touch": "lowtide.plan.policies.first_touch:FirstTouch",
    "halo": "lowtide.plan.policies.halo:Halo",
    "sentinel": "lowtide.plan.policies.sentinel:Sentinel",
    "soft2lm": "lowtide.plan.policies.soft2lm:Soft2Lm",
    "tahoe": "lowtide.plan.policies.tahoe:Tahoe",
    "tiertrain": "lowtide.plan.policies.tiertrain:TierTrain",
    "two_level": "lowtide.plan.policies.two_level:TwoLevel",
}


# Policies that take the path of a file after a colon.
_TAKE_A_FILE = frozenset({"deeptm"})


def policy_names() -> tuple[str, ...]:
    """Return the names of every policy that can be selected, in alphabetical order."""
    return tuple(sorted({*_BUILTIN_POLICIES, *_installed()}))


def registered_name(name: str) -> str:
    """Return the name that a policy is registered under; capitals, hyphens, underscores and blanks do not matter.

    The text after a colon is passed to the policy unchanged: "deeptm:agent.zip".
    """
    installed = policy_names()
    name, colon, told = name.partition(":")
    if colon:
        taker = registered_name(name)
        if taker not in _TAKE_A_FILE:
            takers = ", ".join(sorted(_TAKE_A_FILE))
            raise BadArgument(f"policy {taker!r} takes nothing after a colon: only {takers} does")
        return f"{taker}:{told}"
    if name in installed:
        return name
    known = {bare(each): each for each in installed}
    if bare(name) not in known:
        plain = name.strip().lower().replace("-", "_")
        raise BadArgument(f"unknown policy {name!r}{did_you_mean(plain, installed) or _one_of(installed)}")
    return known[bare(name)]


def policy(name_or_object: str | Policy) -> Policy:
    """Return the policy of that name, or the object itself if it is a policy."""
    if not isinstance(name_or_object, str):
        return _as_policy(name_or_object, origin=f"{name_or_object!r}")
    name_or_object, _, told = registered_name(name_or_object).partition(":")
    if target := _BUILTIN_POLICIES.get(name_or_object):
        module, _, attribute = target.partition(":")
        made = getattr(import_module(module), attribute)
        return _as_policy(made(told) if told else made, origin=target)
    entry = _installed()[name_or_object]
    try:
        found = entry.load()
    except Exception as error:  # whatever a third-party module raises on import is its user's answer
        raise BadArgument(f"policy {name_or_object!r} ({entry.value}) does not load: {error}") from error
    return _as_policy(found, origin=entry.value)


def _one_of(names: tuple[str, ...]) -> str:
    return f": choose one of {', '.join(names)}"


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=POLICY_GROUP)}


def _as_policy(found: object, *, origin: str) -> Policy:
    if isinstance(found, type) or (callable(found) and not isinstance(found, Policy)):
        try:
            found = found()
        except TypeError as error:
            raise BadArgument(f"{origin} cannot be called without arguments to make a policy: {error}") from error
    if not isinstance(found, Policy) or not isinstance(found.about, About):
        raise BadArgument(
            f"{origin} is not a policy: it needs name, summary, about and plan(problem); "
            "`about` is a lowtide.plan.policy.About, as in About(family=Family.SWAP_OUT, runs=(Runs.REAL,))"
        )
    return found
