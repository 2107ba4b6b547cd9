"""A game of two players: take 1, 2 or 3 of the remaining stones; the player who takes the last one wins.

    state "09:"    move "3?"    state "06:"    move "2?"    ...

`AgainstRival`: the policy moves first, a frozen model second. `SelfPlay`: the policy plays both roles, each with a
separate trajectory and reward. Leaving a multiple of 4 wins.
"""

import random

from areal_like import Sample, Transcript

END = "?"


def rows(seed, split, *, limit, options):
    """Rows of `prompt`, `stones` and `answer`, the stones to take; 0: every move loses against good play."""
    rng = random.Random(f"nim/{split}/{seed}")
    for number in range(limit):
        stones = 5 + (number % 8 if split == "eval" else rng.randrange(8))
        yield {"prompt": state(stones), "stones": stones, "answer": str(stones % 4)}


def demonstrations(seed, split, *, limit, options):
    """Games of random moves, which teach the format of a move, not which one is good."""
    rng = random.Random(f"nim/demonstrations/{seed}")
    for _ in range(limit):
        left = rng.randint(1, 12)
        prompt, spans = state(left), []
        while left:
            taken = rng.randint(1, min(3, left))
            left -= taken
            spans += [[f"{taken}{END}", True], [state(left), False]]
        yield {"prompt": prompt, "spans": spans[:-1]}


class AgainstRival:
    """The policy against the model `rival`, which is not trained."""

    is_resumable = False
    models = ("rival",)

    async def run(self, task, tools):
        left, is_ours = task.row["stones"], True
        game = Transcript(tools.tokens.prompt(task.row), encode=tools.tokens.encode)
        while True:
            if is_ours:
                answer = await move(tools, tools, game)
                game.sampled(answer)
            else:
                answer = await move(tools, tools.models["rival"], position(tools, left))
                game.given(answer)  # keeps the rival's name and version
            taken = taken_by(tools, answer, left)
            left -= taken
            if not taken or not left:
                break
            game.given(state(left))
            is_ours = not is_ours
        has_won = is_ours == bool(taken)  # a player without a valid move loses
        verdict = tools.verdict(float(has_won), components={"correct": float(has_won)})
        text = tools.tokens.decode(game.tokens_T)
        return Sample(trajectory=game.close("environment"), verdict=verdict, response_text=text)


class SelfPlay:
    """The policy against itself, as `first` and as `second`: a role that is declared as not trained only plays."""

    is_resumable = False
    models = ("first", "second")

    async def run(self, task, tools):
        left, turn, taken = task.row["stones"], 0, 1
        players = [tools.models["first"], tools.models["second"]]
        games = [Transcript(tools.tokens.prompt(task.row), encode=tools.tokens.encode), None]
        good, chances = 0, 0
        while left and taken:
            mine, other = turn % 2, 1 - turn % 2
            if games[mine] is None:
                games[mine] = Transcript(position(tools, left), encode=tools.tokens.encode)
            answer = await move(tools, players[mine], games[mine])
            taken = taken_by(tools, answer, left)
            chances, good = chances + (left % 4 > 0), good + (left % 4 > 0 and taken == left % 4)
            left -= taken
            for place, game in enumerate(games):
                if game is None:
                    continue
                if place == mine and players[mine].is_trained:
                    game.sampled(answer)
                else:
                    game.given(answer)
                if left and taken and place == other:
                    game.given(state(left))
            turn += 1
        winner = (turn - 1) % 2 if taken else turn % 2
        share = good / chances if chances else 1.0
        parts = {"correct": float(good == chances), "good_moves": share, "turns": float(turn)}
        trained = [
            game.close("environment", turn_rewards=[(game.num_sampled, 1.0 if place == winner else -1.0)])
            for place, game in enumerate(games)
            if game is not None and game.num_sampled
        ]
        verdict = tools.verdict(float(winner == 0), components=parts)
        text = tools.tokens.decode(games[0].tokens_T)
        return Sample(trajectory=trained[0], others=tuple(trained[1:]), verdict=verdict, response_text=text)


def state(stones):
    """The number of remaining stones as text for the players."""
    return f"{stones:02d}:"


def position(tools, stones):
    """Tokens of a game that begins with `stones` stones."""
    return tools.tokens.prompt({"prompt": state(stones)})


async def move(tools, player, game):
    """A player's answer: a digit and the end mark of a move, if it is valid."""
    return await player.generate(game, max_new_tokens=2, stop_token_ids=tools.tokens.encode(END)[-1:])


def taken_by(tools, answer, left):
    """Number of stones that a move takes; 0 if it is invalid."""
    digit = tools.tokens.decode(answer.segment.tokens_R).removesuffix(END)
    return int(digit) if digit in ("1", "2", "3") and int(digit) <= left else 0
