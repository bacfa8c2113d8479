"""How one mesh axis spreads a model over its ranks: one file an axis, named as in Layout.

`engine/spread.py` composes them in one fixed order.
"""
