"""The prompts of the greedy references: ten chats and ten texts to continue, our own."""

Message = dict[str, str]

CHATS: tuple[list[Message], ...] = (
    [{"role": "user", "content": "Hello!"}],
    [{"role": "user", "content": "What is a good way to learn to cook?"}],
    [
        {
            "role": "user",
            "content": "My train to work is late three days out of five. Should I move house, "
            "change jobs, or buy a bicycle? Give me one reason for each.",
        }
    ],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why does bread rise?"},
    ],
    [
        {"role": "user", "content": "I want to read more books this year."},
        {"role": "assistant", "content": "That is a fine plan. What do you like to read?"},
        {"role": "user", "content": "Old novels about the sea, and anything with a map in it."},
    ],
    [
        {
            "role": "user",
            "content": "Write a Python function that returns the largest number of a list, "
            "and raises an error when the list is empty.",
        }
    ],
    [
        {
            "role": "user",
            "content": "A box holds 12 pencils. I give away 5 boxes and 7 single pencils. "
            "How many pencils did I give away in all?",
        }
    ],
    [{"role": "user", "content": "Translate “café” and “naïve” – what do they mean? ☕ 日本"}],
    [
        {"role": "user", "content": "Book me a table for two."},
        {"role": "assistant", "content": "For which evening, and at what time?"},
        {"role": "user", "content": "Friday at seven."},
        {"role": "assistant", "content": "Which part of the city do you prefer?"},
        {"role": "user", "content": "Near the river, somewhere quiet, and not too expensive."},
    ],
    [
        {
            "role": "user",
            "content": "Summarise this note for a friend who was away.\n\n"
            "On Monday the boiler stopped, and the man who came to look at it said that the "
            "pump was worn out. He could not get a new one before Thursday. We spent three days "
            "in coats. On Tuesday the neighbours lent us two electric heaters; one of them blew "
            "the fuse of the whole floor. On Wednesday we cooked soup for everyone on the "
            "stairs, because theirs was the only kitchen that still had power. The pump came on "
            "Thursday morning and was the wrong size. It was changed on Friday, and since then "
            "the flat has been too warm.",
        }
    ],
)

CONTINUATIONS: tuple[str, ...] = (
    "The",
    "Once upon a time, in a village between two hills,",
    "The most important part of a bicycle is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Water boils at a lower temperature on a mountain because",
    "1. Wash the potatoes.\n2. Peel them.\n3.",
    "In economics, the price of a good rises when",
    "She looked at the letter for a long time before she",
    "   \n\n# Installation\n\nTo build the program from source, first install a C compiler, "
    "then run\n\n```",
    "The committee met four times in the spring. At its first meeting it heard the engineers, "
    "who had measured the old bridge from end to end and found that two of its seven arches had "
    "moved by the width of a hand since it was built. At its second meeting it heard the "
    "merchants, who wanted a wider bridge, and the boatmen, who wanted a higher one. At its "
    "third meeting nobody came except the chairman and the clerk, and the clerk wrote down that "
    "the chairman had been present. At its fourth meeting, which lasted until midnight, it was "
    "decided that",
)
