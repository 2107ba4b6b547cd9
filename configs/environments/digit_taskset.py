"""A task set for verifiers 0.4: two numbers to add. configs/verifiers_tiny.yaml shows how it is used."""

import verifiers.v1 as v1


class SumData(v1.TaskData):
    answer: str = ""


class SumTask(v1.Task[SumData]):
    @v1.reward(weight=1.0)
    async def right(self, trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)

    @v1.reward(weight=0.1)
    async def number(self, trace) -> float:
        return float((trace.last_reply or "").strip().isdigit())


class SumConfig(v1.TasksetConfig):
    largest: int = 9


class SumTaskset(v1.Taskset[SumTask, SumConfig]):
    def load(self):
        for one in range(self.config.largest + 1):
            for other in range(self.config.largest + 1):
                data = SumData(name=f"{one}+{other}", prompt=f"{one}+{other}=", answer=str(one + other))
                yield SumTask(data, self.config.task)


__all__ = ["SumTaskset"]
