"""What trainers and RL frameworks ask of a rollout server (`ServerConfig.rl`): token ids in and out, new weights, pausing and
sleeping, in the words of vLLM (which SkyRL, prime-rl, verifiers and ART use) and SGLang (slime, AReaL)."""

from paceline.server.rl.backend import Backend, Routes
from paceline.server.rl.sglang import SglangApi
from paceline.server.rl.vllm import VllmApi
from paceline.server.rl.weights import Weights

__all__ = ["Backend", "RlApi"]


class RlApi:
    """All paths for trainers."""

    def __init__(self, backend: Backend) -> None:
        self._weights = Weights(backend.engine, backend.thread, backend.control, backend.config.rl_weights_dir)
        self.routes: Routes = [*VllmApi(backend, self._weights).routes(), *SglangApi(backend, self._weights).routes()]

    async def close(self) -> None:
        """Leave all process groups."""
        await self._weights.leave_groups()
