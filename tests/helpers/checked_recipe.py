"""The recipe of tests that ask what would run: four clients with digits of two networks, and rows that are held out."""

CHECKED = """
[data]
dataset = "digits"
limit_train = 240
num_clients = 4
partition = "iid"
split = "6:1:3"
holdout = 20

[models]
architectures = ["digits-cnn1", "digits-cnn2"]

[method]
name = "fedgh"

[training]
rounds = 2
batch_size = 8
"""
