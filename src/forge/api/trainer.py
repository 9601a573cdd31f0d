"""The Trainer protocol: nine asynchronous methods that train a language model."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from forge.api.types import (
    ForwardBackwardResult,
    LossFn,
    OptimStepResult,
    TextTrainBatch,
    TrainerConfig,
    TrainerStatus,
)


@runtime_checkable
class Trainer(Protocol):
    """Trains one language model, step by step, wherever its weights live.

    A step is any number of `forward_backward` calls, whose gradients add up, and one `optim_step`.
    A class conforms by having these methods; `isinstance` looks at their names only. Tensors may
    be handed in on the CPU whatever device the trainer computes on. No method changes what it is
    given, or later changes what it has returned. Any may raise for reasons of its machinery (out
    of memory, a lost process); what is said below is what else it raises.

    Example:
        >>> import asyncio
        >>> import torch
        >>> from forge.api import TextTrainBatch, Trainer
        >>> async def train(trainer: Trainer, microbatches: list[TextTrainBatch]) -> float:
        ...     losses = [(await trainer.forward_backward(each)).loss for each in microbatches]
        ...     await trainer.optim_step()
        ...     return sum(losses) / len(losses)

        Anything with the nine methods goes in, whatever it inherits from:

        >>> from types import SimpleNamespace
        >>> class Bigram:
        ...     def __init__(self):
        ...         self.logits = torch.zeros(8, 8, requires_grad=True)
        ...         self.optimizer = torch.optim.SGD([self.logits], lr=1.0)
        ...         self.step = self.pending = 0
        ...
        ...     async def forward_backward(self, batch, loss_fn=None):
        ...         outputs = {"logits": self.logits[batch.input_ids]}
        ...         loss = (loss_fn or self.mean_loss)(outputs, batch)
        ...         loss.backward()
        ...         self.pending += 1
        ...         return SimpleNamespace(loss=loss.item(), metrics={})
        ...
        ...     def mean_loss(self, outputs, batch):
        ...         predicted = outputs["logits"].flatten(0, 1)
        ...         return torch.nn.functional.cross_entropy(predicted, batch.target_ids.flatten())
        ...
        ...     async def optim_step(self):
        ...         self.optimizer.step()
        ...         applied, self.step = self.pending, self.step + 1
        ...         await self.clear_gradients()
        ...         return SimpleNamespace(
        ...             step=self.step, learning_rate=1.0, accumulated_microbatches=applied
        ...         )
        ...
        ...     async def clear_gradients(self):
        ...         self.optimizer.zero_grad()
        ...         self.pending = 0
        ...
        ...     async def forward(self, inputs): ...
        ...     async def save(self, name=None, path=None, weights_only=False): ...
        ...     async def load(self, path=None): ...
        ...     async def get_config(self): ...
        ...     async def get_status(self): ...
        ...     async def get_tokenizer(self): ...
        >>> isinstance(Bigram(), Trainer)
        True
        >>> tokens = torch.tensor([[1, 2, 3, 1, 2, 3]])
        >>> batch = TextTrainBatch(tokens[:, :-1], tokens[:, 1:])
        >>> trainer = Bigram()
        >>> before = asyncio.run(train(trainer, [batch, batch]))
        >>> after = asyncio.run(train(trainer, [batch]))
        >>> before > after
        True
    """

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        """Compute the loss of `batch` and add its gradient to what has accumulated.

        Weights, optimizer state, schedule and step stay as they are; the number of accumulated
        microbatches rises by one.

        Args:
            batch: One microbatch, from 1 × 1 up to `max_seq_len` tokens a row.
            loss_fn: The loss for this call only. It is called as `loss_fn(outputs, batch)`, with
                `outputs["logits"]` floating, `[batch, seq, vocab_size]`, carrying an autograd
                graph. None means the trainer's own loss, in which a masked target and one of
                weight zero have no part, and None for mask or weights means all ones.

        Returns:
            The loss as a float: finite, or visibly NaN or infinite. And the metrics of this call.

        Raises:
            Exception: Ids outside the vocabulary or of a float dtype, a rank other than 2, shapes
                that differ, an empty batch; the message says what is wrong. A batch whose mask
                keeps nothing, and rows over `max_seq_len`, may be refused as well. An exception of
                `loss_fn` reaches the caller as it is, as the cause, or named in the message.
                Nothing has changed then, unless it failed inside backward: weights and status are
                as before, and `clear_gradients` makes the trainer sound again.

        Example:
            >>> import asyncio, torch
            >>> from forge.api import ForwardBackwardResult, TextTrainBatch
            >>> class Bigram:
            ...     def __init__(self):
            ...         self.logits = torch.zeros(8, 8, requires_grad=True)
            ...
            ...     async def forward_backward(self, batch, loss_fn):
            ...         loss = loss_fn({"logits": self.logits[batch.input_ids]}, batch)
            ...         loss.backward()
            ...         return ForwardBackwardResult(loss.item(), metrics={})
            >>> def summed_loss(outputs, batch):
            ...     log_probs = outputs["logits"].log_softmax(-1)
            ...     picked = log_probs.gather(-1, batch.target_ids.unsqueeze(-1)).squeeze(-1)
            ...     return -(picked * batch.target_mask).sum()
            >>> ids = torch.tensor([[1, 2, 3]])
            >>> batch = TextTrainBatch(ids, ids + 1, target_mask=torch.tensor([[0, 1, 1]]))
            >>> trainer = Bigram()
            >>> result = asyncio.run(trainer.forward_backward(batch, summed_loss))
            >>> round(result.loss, 4)  # two kept tokens, ln 8 nats each
            4.1589
            >>> trainer.logits.grad.any(dim=1).nonzero().flatten()  # the masked target has no part
            tensor([2, 3])
        """
        ...

    async def optim_step(self) -> OptimStepResult:
        """Apply the accumulated gradients once, then clear them and advance step and schedule.

        Step and schedule each advance by one, however many microbatches there were. Clipping, if
        any, is of the accumulated gradient.

        Returns:
            The new step, the learning rate that this step used, the number of microbatches it
            applied.

        Raises:
            Exception: Nothing has accumulated (or it does nothing then): weights, step and
                schedule are as before. A gradient isn't finite (or the update is skipped):
                weights are as before, gradients are gone.

        Example:
            >>> import asyncio, torch
            >>> from forge.api import OptimStepResult
            >>> class Slope:
            ...     def __init__(self):
            ...         self.weight = torch.tensor([1.0], requires_grad=True)
            ...         self.optimizer = torch.optim.SGD([self.weight], lr=0.5)
            ...         self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.1)
            ...
            ...     async def optim_step(self):
            ...         used = self.schedule.get_last_lr()[0]
            ...         self.optimizer.step()
            ...         self.schedule.step()
            ...         self.optimizer.zero_grad()
            ...         return OptimStepResult(
            ...             step=1, learning_rate=used, accumulated_microbatches=2
            ...         )
            >>> trainer = Slope()
            >>> for _ in range(2):
            ...     trainer.weight.sum().backward()
            >>> asyncio.run(trainer.optim_step())
            OptimStepResult(step=1, learning_rate=0.5, accumulated_microbatches=2)
            >>> trainer.weight.item()
            0.0
        """
        ...

    async def clear_gradients(self) -> None:
        """Discard the accumulated gradients; the number of accumulated microbatches becomes 0.

        Weights, optimizer state, schedule and step stay as they are. A second call changes
        nothing. After a `forward_backward` that failed this makes the trainer sound again.

        Example:
            >>> import asyncio, torch
            >>> class Linear:
            ...     def __init__(self):
            ...         self.model = torch.nn.Linear(2, 1)
            ...
            ...     async def clear_gradients(self):
            ...         self.model.zero_grad()
            >>> trainer = Linear()
            >>> trainer.model(torch.ones(2)).backward()
            >>> asyncio.run(trainer.clear_gradients())
            >>> trainer.model.weight.grad is None
            True
        """
        ...

    async def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """The model's logits, without dropout and without an autograd graph.

        Nothing changes by it: weights, accumulated gradients, status, random streams, train or
        eval mode. The logits at `[b, t]` depend on `input_ids[b, :t + 1]` alone, so neither on
        later tokens nor on other rows.

        Args:
            inputs: `input_ids`, int64 `[batch, seq]`, each in `[0, vocab_size)`.

        Returns:
            Finite floating logits `[batch, seq, vocab_size]`, natural-log scale, the caller's own.

        Raises:
            Exception: The ids can't be computed on, or a row is over `max_seq_len`.

        Example:
            >>> import asyncio, torch
            >>> class Bigram:
            ...     def __init__(self):
            ...         self.logits = torch.nn.Embedding(8, 8)
            ...
            ...     async def forward(self, inputs):
            ...         with torch.no_grad():
            ...             return self.logits(inputs["input_ids"])
            >>> inputs = {"input_ids": torch.tensor([[1, 2], [3, 4]])}
            >>> logits = asyncio.run(Bigram().forward(inputs))
            >>> logits.shape, logits.requires_grad
            (torch.Size([2, 2, 8]), False)
        """
        ...

    async def save(
        self, name: str | None = None, path: str | None = None, weights_only: bool = False
    ) -> str:
        """Write a checkpoint of this moment; training on doesn't change it.

        Nothing of the trainer changes by it; pending gradients stay pending and aren't saved.

        Args:
            name: The checkpoint's name. None lets the trainer name it after the step.
            path: The folder to save in, made if it is missing. None means the trainer's own.
                With both, the checkpoint is at `path/name`.
            weights_only: Save what restores the logits, and no optimizer state.

        Returns:
            The full path of the checkpoint, which `load` takes.

        Raises:
            Exception: It can't be written, or the name exists and isn't to be replaced. Older
                checkpoints are as before, and `load` takes nothing half-written.

        Example:
            >>> import asyncio, tempfile, torch
            >>> from pathlib import Path
            >>> class Linear:
            ...     model = torch.nn.Linear(2, 1)
            ...
            ...     async def save(self, name=None, path=None, weights_only=False):
            ...         location = Path(path) / name
            ...         location.parent.mkdir(parents=True, exist_ok=True)
            ...         torch.save(self.model.state_dict(), location)
            ...         return str(location)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     saved = asyncio.run(Linear().save("best", path=folder, weights_only=True))
            ...     Path(saved).name, Path(saved).exists()
            ('best', True)
        """
        ...

    async def load(self, path: str | None = None) -> str:
        """Go back to a checkpoint; pending gradients are discarded, not applied.

        A full checkpoint brings back weights, optimizer state, schedule, step and random streams:
        the trainer goes on exactly as the one that saved it. A weights-only one brings back the
        weights; what it does to step and schedule is the author's choice.

        Args:
            path: What `save` returned. None means the most recently saved complete full
                checkpoint of the trainer's own folder.

        Returns:
            The full path of the checkpoint that was loaded.

        Raises:
            Exception: There is none (the message names the path), it is damaged, or it belongs to
                another model. Nothing has changed then.

        Example:
            >>> import asyncio, tempfile, torch
            >>> class Linear:
            ...     def __init__(self):
            ...         self.model = torch.nn.Linear(2, 1)
            ...
            ...     async def load(self, path=None):
            ...         self.model.load_state_dict(torch.load(path, weights_only=True))
            ...         self.model.zero_grad()
            ...         return path
            >>> weights = {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}
            >>> trainer = Linear()
            >>> with tempfile.NamedTemporaryFile() as file:
            ...     torch.save(weights, file.name)
            ...     asyncio.run(trainer.load(file.name)) == file.name
            True
            >>> trainer.model.weight.tolist()
            [[1.0, 1.0]]
            >>> asyncio.run(trainer.load("no/such/checkpoint"))
            Traceback (most recent call last):
            ...
            FileNotFoundError: [Errno 2] No such file or directory: 'no/such/checkpoint'
        """
        ...

    async def get_config(self) -> TrainerConfig:
        """What this trainer is: the same before and after training, saving and loading.

        Returns:
            A copy of the caller's own; changing it changes nothing of the trainer.

        Example:
            >>> import asyncio, copy
            >>> from forge.api import ParallelismConfig, TrainerConfig
            >>> class Tiny:
            ...     config = TrainerConfig("tiny", {"vocab_size": 256}, ParallelismConfig())
            ...
            ...     async def get_config(self):
            ...         return copy.deepcopy(self.config)
            >>> config = asyncio.run(Tiny().get_config())
            >>> config.model_config["vocab_size"] = 1
            >>> asyncio.run(Tiny().get_config()).model_config["vocab_size"]
            256
        """
        ...

    async def get_status(self) -> TrainerStatus:
        """Where this trainer stands: its step, and the microbatches pending. Changes nothing.

        Example:
            >>> import asyncio
            >>> from forge.api import TrainerStatus
            >>> class Fresh:
            ...     async def get_status(self):
            ...         return TrainerStatus(step=0, accumulated_microbatches=0)
            >>> asyncio.run(Fresh().get_status())
            TrainerStatus(step=0, accumulated_microbatches=0)
        """
        ...

    async def get_tokenizer(self) -> Any:
        """The tokenizer of the model. Changes nothing.

        Returns:
            An object that answers as a Hugging Face tokenizer does: `encode(text)` gives ids in
            `[0, vocab_size)`, `decode(ids)` a string; `pad_token_id` and `eos_token_id` are ids
            or None.

        Example:
            >>> import asyncio
            >>> class Bytes:
            ...     pad_token_id = eos_token_id = None
            ...
            ...     def encode(self, text):
            ...         return list(text.encode())
            ...
            ...     def decode(self, ids):
            ...         return bytes(ids).decode()
            >>> class Tiny:
            ...     async def get_tokenizer(self):
            ...         return Bytes()
            >>> tokenizer = asyncio.run(Tiny().get_tokenizer())
            >>> tokenizer.decode(tokenizer.encode("hello"))
            'hello'
        """
        ...
