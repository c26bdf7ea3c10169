"""qrl: does RL post-training change how cleanly a model quantizes?"""
