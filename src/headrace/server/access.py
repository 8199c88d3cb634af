"""How routes reach the service: it is there once the model is loaded."""

from __future__ import annotations

import dataclasses

from fastapi import Request

from headrace.errors import ModelNotServed, NotReady
from headrace.server.service import Service


@dataclasses.dataclass
class Serving:
    """What `app.state.serving` holds: the service, or why there is none."""

    service: Service | None = None
    stopping: bool = False
    loading: str = "the model is being loaded"

    def trouble(self) -> str | None:
        """Why requests cannot be answered, or None."""
        if self.service is None:
            return self.loading
        return "it is stopping" if self.stopping else self.service.batcher.trouble()


def serving(request: Request) -> Serving:
    """The state of the server that this request came to."""
    state: Serving = request.app.state.serving
    return state


def loaded_service(request: Request) -> Service:
    """Raises: NotReady while there is no model."""
    state = serving(request)
    if state.service is None:
        raise NotReady(reason=state.loading)
    return state.service


def checked_service(request: Request, model: str | None) -> Service:
    """The service, for a request that asks for this model. Raises: NotReady, ModelNotServed."""
    service = loaded_service(request)
    if serving(request).stopping:
        raise NotReady(reason="it is stopping")
    if model is not None and model != service.options.name:
        raise ModelNotServed(model=model[:200], served=service.options.name)
    return service
