"""What docs/writing-a-plugin.md promises, of every plugin: one set of cases, on two real MPI ranks.

`plugin` says what a case needs of a plugin, ``adapters`` has one for each, `reference` computes in plain NumPy what
must come out. To run the cases with a plugin of your own, write an adapter and name it::

    TEST_CONTRACT_ADAPTER=mine.adapter pytest tests/contract
"""
