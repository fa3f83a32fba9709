"""The simulator: executes a plan's GPU programs by discrete events, with times that are given.

timing says how long things take, device is the GPU with its streams and its link, placing binds
holes as the runtime's recompile does, executor runs the instructions, report sums up. Nothing here
shares code with the mock driver (runtime_c/mock): that both give the same times is tested.
"""
