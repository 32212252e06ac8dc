"""ConstantModel: a ModelRunner for tests of whose turn it is, which is all that they see of it."""

from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.scheduling.scheduler import ModelRunnerOutput, SampledToken, SchedulerOutput


class ConstantModel:
    """Says the same token for ever."""

    def execute(self, output: SchedulerOutput, kv: KVCacheManager) -> ModelRunnerOutput:
        return ModelRunnerOutput(
            {
                item.sequence.seq_id: [SampledToken(1)] * item.num_samples
                for item in output.scheduled
            }
        )
