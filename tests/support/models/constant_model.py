"""ConstantModel: a ModelRunner for tests of whose turn it is, which is all that they see of it."""

from loraplex.engine.step import RowSampling, SampledToken, StepInput, StepOutput


class ConstantModel:
    """Says the same token for ever."""

    def execute(self, step: StepInput) -> StepOutput:
        rows = [row for row in step.rows if isinstance(row, RowSampling)]
        return StepOutput({row.seq_id: [[SampledToken(1)]] * row.num_choices for row in rows})
