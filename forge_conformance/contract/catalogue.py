"""All clauses of the Trainer contract 1.0, in its order; every check and report derives from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from forge_conformance.contract.clause import Clause, Level, Need

MUST, SHOULD = Level.MUST, Level.SHOULD

AREAS: Mapping[str, str] = MappingProxyType(
    {
        "structure": "Structure",
        "config": "Configuration",
        "status": "Status",
        "tokenizer": "Tokenizer",
        "forward": "Forward",
        "forward_backward": "Forward and backward",
        "optim_step": "Optimizer step",
        "clear_gradients": "Clearing gradients",
        "checkpoint": "Checkpoint",
        "metrics": "Metrics",
        "numerics": "Numerics",
        "concurrency": "Concurrency",
        "isolation": "Isolation",
        "resources": "Resources",
        "distributed": "Distributed",
    }
)
"""The areas of the contract in its order, each with its title."""

_PENDING = {
    name: f"no check yet: {name} is still to be built"
    for name in (
        "concurrency",
        "isolation",
        "resources",
    )
}

_CLAUSES = (
    # Structure
    Clause(
        "structure.methods",
        MUST,
        "has forward_backward, optim_step, clear_gradients, forward, save, load, get_config, "
        "get_status and get_tokenizer, and isinstance(t, Trainer) holds",
    ),
    Clause(
        "structure.awaitable",
        MUST,
        "returns an awaitable from each method: the caller needs no .call(), .route(), .fanout() "
        "or future object",
    ),
    Clause(
        "structure.signatures",
        MUST,
        "takes the protocol's parameters by the protocol's names, by position or keyword, with "
        "the protocol's defaults, and more parameters only if they are optional",
    ),
    Clause(
        "structure.result_types",
        MUST,
        "returns results whose fields have the declared types: loss a real float, step and counts "
        "int (no bool, no float, no tensor), learning_rate a float (an int or a NumPy float is "
        "one), metrics a mapping, paths str",
    ),
    Clause(
        "structure.annotations",
        SHOULD,
        "annotates its methods compatibly with the protocol, so that a static checker accepts it",
    ),
    # Configuration, status, tokenizer
    Clause(
        "config.fields",
        MUST,
        "reports a non-empty model_name, a model_config with an int vocab_size > 0, and a "
        "parallelism with every degree ≥ 1, world_size = dp·tp·pp·cp, ranks within their degree, "
        "and a device that torch.device accepts",
    ),
    Clause(
        "config.common_keys",
        SHOULD,
        "reports hidden_size, num_layers, num_attention_heads and max_seq_len, and a model_config "
        "that JSON can hold",
    ),
    Clause(
        "config.static",
        MUST,
        "reports the same configuration before and after training, saving and loading",
    ),
    Clause(
        "config.not_aliased",
        MUST,
        "hands out a copy of its configuration: changing the returned object changes nothing",
    ),
    Clause(
        "status.counts",
        MUST,
        "counts each successful forward_backward once in accumulated_microbatches, which is 0 "
        "after optim_step, clear_gradients and load",
    ),
    Clause(
        "status.step",
        MUST,
        "raises step by exactly one per optim_step that applied its gradients, and by nothing "
        "else but load; a full checkpoint brings its step back, what a weights-only one does to "
        "step and schedule is the author's choice",
    ),
    Clause(
        "status.read_only",
        MUST,
        "is unchanged by get_status, get_config and get_tokenizer themselves",
    ),
    Clause(
        "tokenizer.ids_fit",
        MUST,
        "encodes text to ids inside [0, vocab_size) of the model, and decodes them back to a "
        "string",
    ),
    Clause(
        "tokenizer.round_trip",
        SHOULD,
        "gives back the text that its tokenizer encoded (special tokens aside), has pad_token_id "
        "and eos_token_id or None, and answers as a Hugging Face tokenizer does",
    ),
    # Forward
    Clause(
        "forward.shape",
        MUST,
        "returns a plain floating torch.Tensor [batch, seq, vocab_size] with finite values, for "
        "every batch ≥ 1 and 1 ≤ seq ≤ max_seq_len (or the declared shapes)",
    ),
    Clause("forward.no_grad", MUST, "returns logits with no autograd graph"),
    Clause(
        "forward.repeatable",
        MUST,
        "returns the same logits for the same input again: no dropout, whatever the random state",
    ),
    Clause(
        "forward.pure",
        MUST,
        "changes by forward neither weights, accumulated gradients, status, random streams nor "
        "train/eval mode: a trajectory with forward calls sprinkled in equals the one without",
        needs=(Need.TWIN,),
    ),
    Clause(
        "forward.causal",
        MUST,
        "gives logits at position t that don't depend on tokens after t",
    ),
    Clause(
        "forward.rows_independent",
        MUST,
        "gives each row logits that don't depend on the other rows, their number or order",
    ),
    Clause(
        "forward.input_untouched",
        MUST,
        "leaves the input of forward as it was, and takes CPU tensors whatever its device",
    ),
    Clause(
        "forward.output_owned",
        MUST,
        "never changes a tensor it has returned: a later call writes elsewhere",
    ),
    # Forward and backward
    Clause(
        "forward_backward.loss_value",
        MUST,
        "returns as loss the value of the custom loss on this batch, equal to the same function "
        "computed in float64 from forward's logits (not stochastic ones); with the default loss "
        "the same value for the same batch and weights again: no running mean, no other batch's",
    ),
    Clause(
        "forward_backward.custom_loss",
        MUST,
        'calls loss_fn(outputs, batch) with outputs["logits"] [batch, seq, vocab_size] carrying '
        "a graph and the batch's own content, and differentiates its value",
    ),
    Clause(
        "forward_backward.custom_loss_once",
        MUST,
        "uses loss_fn for that call only: the next call without one uses the default",
    ),
    Clause(
        "forward_backward.default_loss",
        MUST,
        "without loss_fn has a finite loss in which every unmasked target matters, a masked one "
        "never does, to loss or gradient, target_mask=None and target_weights=None mean all ones, "
        "the target under a zero weight has no influence, and fractional weights count as "
        "fractions",
    ),
    Clause(
        "forward_backward.declared_loss",
        MUST,
        "without loss_fn returns the declared default loss, computed in float64",
        needs=(Need.DECLARED_DEFAULT_LOSS,),
    ),
    Clause(
        "forward_backward.weights_fixed",
        MUST,
        "leaves the weights as they were in forward_backward: only gradients accumulate",
    ),
    Clause(
        "forward_backward.accumulates",
        MUST,
        "adds gradients: the effect of several calls is the sum of their gradients, whatever "
        "their order",
        needs=(Need.IN_PROCESS,),
        or_needs=(Need.TWIN,),
    ),
    Clause(
        "forward_backward.linear_in_loss",
        MUST,
        "gives c times the gradient for c times the loss, and the same from two calls with half "
        "the loss as from one",
        needs=(Need.IN_PROCESS,),
        or_needs=(Need.TWIN,),
    ),
    Clause(
        "forward_backward.batch_untouched",
        MUST,
        "leaves the batch's tensors as they were",
    ),
    Clause(
        "forward_backward.all_masked",
        MUST,
        "on a batch whose mask keeps nothing raises a clear error and changes nothing, or has a "
        "finite loss and zero gradient; never NaN",
    ),
    Clause(
        "forward_backward.edge_shapes",
        MUST,
        "takes batch 1, seq 1, seq max_seq_len, and masks of bool, int or float dtype",
    ),
    Clause(
        "forward_backward.bad_input",
        MUST,
        "refuses, with an error that says what is wrong, input ids outside the vocabulary, kept "
        "target ids outside it (a masked target may hold anything, -100 too: accepted without "
        "effect, or refused), ids of a float dtype, rank other than 2, shapes that differ and an "
        "empty batch, and never clamps, wraps, cuts or trains on them; a seq over max_seq_len it "
        "refuses or computes in full, never cut",
    ),
    Clause(
        "forward_backward.failure_atomic",
        MUST,
        "after a call that failed before backward (bad input; a loss_fn that raises or returns no "
        "scalar) has the status, weights and accumulated gradients it had before, and goes on as "
        "a run in which the call was never made (dropout's stream excepted); the loss function's "
        "own exception is what the caller sees, or its cause, or named in the message of a "
        "stand-in",
    ),
    Clause(
        "forward_backward.failure_in_backward",
        MUST,
        "after a call that failed inside backward has the status and weights it had before, and "
        "is sound again after clear_gradients",
    ),
    Clause(
        "forward_backward.failure_keeps_gradients",
        SHOULD,
        "keeps the accumulated gradients of earlier calls when a later one fails inside backward",
        needs=(Need.IN_PROCESS,),
        or_needs=(Need.TWIN,),
    ),
    Clause(
        "forward_backward.nonfinite_visible",
        MUST,
        "shows a NaN or infinite loss as such, or raises; never a finite number instead",
    ),
    Clause(
        "forward_backward.learns",
        SHOULD,
        "lowers its default loss on one repeated batch within a few dozen steps",
    ),
    # Optimizer step and clearing gradients
    Clause(
        "optim_step.step_and_count",
        MUST,
        "returns from optim_step the new step (as get_status then shows) and the number of "
        "microbatches it applied",
    ),
    Clause(
        "optim_step.clears",
        MUST,
        "leaves no gradient behind after optim_step: inserting clear_gradients after it changes "
        "nothing later",
        needs=(Need.TWIN,),
        or_needs=(Need.IN_PROCESS,),
    ),
    Clause(
        "optim_step.lr_used",
        MUST,
        "returns the learning rate this step used, not the next one's: finite, ≥ 0; with 0 the "
        "weights stay (judged in process or by exported weights)",
    ),
    Clause(
        "optim_step.schedule",
        MUST,
        "advances the schedule by one per step whatever the number of microbatches, and follows "
        "the declared schedule where one is declared",
    ),
    Clause(
        "optim_step.updates_all",
        MUST,
        "with a learning rate > 0 changes every trainable parameter that has a non-zero gradient "
        "(for parameters of reduced precision a step too small for them is advice, not a break)",
        needs=(Need.IN_PROCESS,),
    ),
    Clause(
        "optim_step.update_rule",
        MUST,
        "moves the weights as the declared optimizer does, replayed in float64 from the same "
        "gradients, clipping included",
        needs=(Need.IN_PROCESS, Need.DECLARED_OPTIMIZER),
    ),
    Clause(
        "optim_step.clip_once",
        MUST,
        "clips the accumulated gradient once per step, not each microbatch",
        needs=(Need.IN_PROCESS, Need.DECLARED_CLIPPING),
        or_needs=(Need.IN_PROCESS, Need.DECLARED_OPTIMIZER),
    ),
    Clause(
        "optim_step.empty",
        MUST,
        "with nothing accumulated raises (as it should) or does nothing: weights, step and "
        "schedule stay",
    ),
    Clause(
        "optim_step.nonfinite",
        SHOULD,
        "doesn't apply a non-finite gradient: it raises, or skips with step and schedule either "
        "both advancing or both staying; the weights stay as they were, the gradients are gone",
    ),
    Clause(
        "clear_gradients.discards",
        MUST,
        "makes what was accumulated have no effect by clear_gradients: count 0, and twice is as "
        "once",
        needs=(Need.IN_PROCESS,),
        or_needs=(Need.TWIN,),
    ),
    Clause(
        "clear_gradients.only_gradients",
        MUST,
        "touches no weight, optimizer state, schedule or step in clear_gradients",
        needs=(Need.TWIN,),
    ),
    Clause(
        "clear_gradients.recovers",
        MUST,
        "is brought back by clear_gradients after a failed forward_backward: what follows equals "
        "a run in which the failure never happened (dropout's stream excepted)",
        needs=(Need.TWIN,),
    ),
    # Checkpoint
    Clause(
        "checkpoint.location",
        MUST,
        "saves at path/name where both are given, at or inside path, at default/name, or at a "
        "default that names the step; creates missing folders; takes spaces and non-ASCII; "
        "returns the full path as str, which exists and which load accepts and returns",
        needs=(Need.LOCAL_FILES,),
    ),
    Clause(
        "checkpoint.round_trip",
        MUST,
        "restores after load the exact logits, step, count 0, of the moment of save",
    ),
    Clause(
        "checkpoint.resumes",
        MUST,
        "continues after load, in the same trainer and in a fresh one, exactly as the run that "
        "never stopped: weights, optimizer state, schedule, step (and random streams where "
        "dropout is on)",
        needs=(Need.TWIN,),
    ),
    Clause(
        "checkpoint.drops_gradients",
        MUST,
        "carries no accumulated gradient across a load",
    ),
    Clause(
        "checkpoint.save_pure",
        MUST,
        "is unchanged by saving: before the first step, between steps and in the middle of "
        "accumulation, whose gradients stay pending",
        needs=(Need.TWIN,),
    ),
    Clause(
        "checkpoint.snapshot",
        MUST,
        "saves the state of the moment: training on after save returned changes nothing in the "
        "checkpoint",
    ),
    Clause(
        "checkpoint.latest",
        MUST,
        "takes by load() the most recently saved complete full checkpoint of the default folder: "
        "step 10 after step 9, whatever the file times say; never a weights-only one while a full "
        "one exists; foreign files in the folder don't confuse it; it raises clearly where there "
        "is none",
        needs=(Need.LOCAL_FILES,),
    ),
    Clause(
        "checkpoint.weights_only",
        MUST,
        "with weights_only=True saves what restores the logits exactly but no optimizer state; "
        "load tells the two kinds apart; the next step moves on from the loaded weights, not from "
        "older copies the optimizer kept",
    ),
    Clause(
        "checkpoint.portable_weights",
        SHOULD,
        "writes the weights-only form as safetensors with Hugging Face names, readable without "
        "this trainer",
        needs=(Need.LOCAL_FILES,),
    ),
    Clause(
        "checkpoint.safe_to_read",
        SHOULD,
        "writes nothing that only an unrestricted unpickler can read",
        needs=(Need.LOCAL_FILES,),
    ),
    Clause(
        "checkpoint.missing",
        MUST,
        "raises for a path that isn't there, names it, and changes nothing",
    ),
    Clause(
        "checkpoint.damaged",
        MUST,
        "for each file of a checkpoint cut short, emptied or removed raises in load and changes "
        "nothing, or restores everything; never another state (and should do the same for "
        "flipped bits)",
        needs=(Need.LOCAL_FILES,),
    ),
    Clause(
        "checkpoint.foreign",
        MUST,
        "refuses a checkpoint whose parameters differ from the model's (missing, unexpected, "
        "other shape), and changes nothing",
        needs=(Need.LOCAL_FILES,),
    ),
    Clause(
        "checkpoint.overwrite",
        MUST,
        "on a name that exists replaces it whole or refuses; a save that fails midway (disk full, "
        "file size limit) raises and leaves the old one loadable at its path",
        needs=(Need.LOCAL_FILES,),
    ),
    Clause(
        "checkpoint.crash_safe",
        MUST,
        "killed at any moment of save leaves the checkpoints of other names loadable, and load() "
        "takes a complete one (killed while overwriting a name, the old or the new one should be "
        "there)",
        needs=(Need.LOCAL_FILES,),
    ),
    Clause(
        "checkpoint.unwritable",
        MUST,
        "raises for a place it can't write, leaves nothing half-written that load() would take, "
        "and trains on",
        needs=(Need.LOCAL_FILES,),
    ),
    Clause(
        "checkpoint.keeps_named",
        SHOULD,
        "never deletes a checkpoint that the caller named (automatic ones may be pruned, but must "
        "never be before a newer one is complete: checkpoint.crash_safe)",
        needs=(Need.LOCAL_FILES,),
    ),
    Clause(
        "checkpoint.precision",
        MUST,
        "restores weights bit for bit in their own dtype",
    ),
    Clause(
        "checkpoint.ties",
        MUST,
        "keeps shared weights shared after load: training on equals the run that never stopped",
        needs=(Need.TWIN,),
    ),
    # Metrics
    Clause(
        "metrics.shape",
        MUST,
        "returns metrics as a mapping from non-empty str to values that are numbers, strings, "
        "booleans, tensors without a graph, Metrics, or lists and mappings of these",
    ),
    Clause(
        "metrics.owned",
        MUST,
        "returns a metrics mapping of its own each time: an earlier result never changes",
    ),
    Clause(
        "metrics.per_call",
        MUST,
        "reports the call at hand: the same call from the same state (clear_gradients between, "
        "weights unchanged, not stochastic) gives the same metrics; those of time, speed and "
        "memory vary, by their names or as declared",
    ),
    Clause(
        "metrics.stable_keys",
        MUST,
        "reports the same metrics keys for the same kind of call, step after step",
    ),
    Clause("metrics.finite", MUST, "reports finite numbers where the loss is finite"),
    Clause(
        "metrics.consistent",
        MUST,
        "where it reports a well-known name, means it: loss equals the loss, perplexity its "
        "exponential, tokens/num_tokens the kept tokens of this batch, learning_rate/lr a rate of "
        "this step",
    ),
    Clause(
        "metrics.schema",
        MUST,
        "follows its declared metric schema: names, kinds, ranges, reductions, units; nothing "
        "undeclared, nothing missing",
        needs=(Need.DECLARED_METRIC_SCHEMA,),
    ),
    Clause(
        "metrics.serialisable",
        SHOULD,
        "reports metrics that can be written as JSON once tensors are turned into numbers or lists",
    ),
    # Numerics
    Clause(
        "numerics.gradient",
        MUST,
        "accumulates the true gradient of the loss, in every trainable parameter: along random "
        "directions it agrees with central differences of the loss",
        needs=(Need.IN_PROCESS,),
    ),
    Clause(
        "numerics.microbatches",
        MUST,
        "with a summed loss, gets the same step from one batch as from its rows split over "
        "several calls",
        needs=(Need.IN_PROCESS,),
        or_needs=(Need.TWIN,),
    ),
    Clause(
        "numerics.train_step",
        MUST,
        "over several steps stays as near to a float64 run of the same step as its compute dtype "
        "allows (on cuda too)",
        needs=(Need.IN_PROCESS, Need.DECLARED_OPTIMIZER),
    ),
    Clause(
        "numerics.deterministic",
        MUST,
        "agrees bitwise with another trainer of the factory that is fed the same",
        needs=(Need.DECLARED_DETERMINISTIC, Need.TWIN),
    ),
    Clause(
        "numerics.parity",
        MUST,
        "agrees with another trainer that loaded the same exported weights: logits, loss, and the "
        "losses after each of several steps",
        needs=(Need.SECOND_TRAINER,),
    ),
    # Concurrency, isolation, resources
    Clause(
        "concurrency.gather",
        MUST,
        "given calls that overlap (asyncio.gather) ends in a state that some order of them gives: "
        "n forward_backward count n and sum their gradients; or refuses the overlapping call with "
        "a clear error, and only those that succeeded count",
    ),
    Clause(
        "concurrency.order",
        SHOULD,
        "takes the calls in the order they were issued, when several are issued before the first "
        "is awaited",
    ),
    Clause(
        "concurrency.cancel",
        MUST,
        "after a cancelled call answers the next one within the time limit, in a state from "
        "before or after that call",
    ),
    Clause(
        "isolation.instances",
        MUST,
        "shares nothing with another instance: training one leaves the other's logits as they were",
    ),
    Clause(
        "isolation.globals",
        MUST,
        "leaves the process as it found it after each call: grad mode, default dtype and device, "
        "deterministic flags, working folder",
    ),
    Clause(
        "isolation.random_streams",
        SHOULD,
        "doesn't reseed or draw from the caller's random, NumPy or torch generators in a way that "
        "makes them repeat",
    ),
    Clause(
        "resources.bounded",
        MUST,
        "holds steady in memory (host and cuda), threads and open files over many calls, of "
        "forward, and of train steps",
    ),
    Clause(
        "resources.closes",
        SHOULD,
        "has close() (or cleanup()), after which its threads and files are gone; twice is as once",
    ),
    # Distributed
    Clause(
        "distributed.agree",
        MUST,
        "returns the same results on every rank that the protocol calls",
        needs=(Need.RANKS,),
    ),
    Clause(
        "distributed.same_as_one",
        MUST,
        "gives, on n ranks, the losses and weights of one rank on the same global batch, within "
        "tolerance",
        needs=(Need.RANKS,),
    ),
    Clause(
        "distributed.checkpoint",
        MUST,
        "saves one checkpoint from all ranks that loads at another world size",
        needs=(Need.RANKS,),
    ),
    Clause(
        "distributed.failure",
        MUST,
        "fails on every rank when it fails on one, within the time limit; no rank waits for ever",
        needs=(Need.RANKS,),
    ),
)

CATALOGUE: Mapping[str, Clause] = MappingProxyType(
    {
        clause.id: replace(clause, pending=_PENDING.get(clause.area, _PENDING.get(clause.id)))
        for clause in _CLAUSES
    }
)
"""Every clause by its id, in the order of the contract."""
