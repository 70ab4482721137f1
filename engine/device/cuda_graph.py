"""Captures work of a CUDA stream as a graph, which can be submitted again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatrain_ray.errors import CaptureError


class CudaCapture:
    """Wraps a CUDA graph.

    The memory that it needs besides its outputs stays in a pool of its own while this object lives.
    """

    def __init__(
        self, stream: torch.cuda.Stream, generator: torch.Generator, function: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        self._graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: meanwhile other threads submit copies and query events, which cannot harm the capture.
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self.outputs = tuple(function())
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # CUDA's, torch's and a model's own
            # After an aborted capture the generator still believes that the capture is running: reset its state.
            generator.graphsafe_set_state(generator.clone_state())
            raise CaptureError(str(error)) from error
        before = generator.get_offset()
        self._graph.replay()
        if generator.get_offset() != before:
            raise CaptureError("it draws random numbers, which would be the same in every step")

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        torch.cuda.synchronize()
        self.outputs = ()
        self._graph.reset()
