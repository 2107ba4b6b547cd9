"""An OpenEnv server: guess a number. configs/openenv_tiny.yaml trains against it.

python openenv_guess_number.py PORT
"""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Answer(Observation):
    text: str = ""


class GuessNumber(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, size=10, **kwargs):
        self.size, self.number, self.guesses = size, random.Random(seed).randrange(size), 0
        return Answer(text=f"A number from 0 to {size - 1}. ", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **kwargs):
        if not 0 <= action.number < self.size:
            return Answer(text=f"{action.number} is out of range. ", done=False, reward=0.0)
        self.guesses += 1
        if action.number == self.number:
            return Answer(text="Found.", done=True, reward=1.0 / self.guesses)
        word = "smaller" if self.number < action.number else "greater"
        return Answer(text=f"It is {word}. ", done=False, reward=0.02)

    @property
    def state(self):
        return State(step_count=self.guesses)


app = create_fastapi_app(GuessNumber, Guess, Answer, max_concurrent_envs=256)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
