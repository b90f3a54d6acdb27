"""The bundled world: a seeded generator of small images with questions and short answers.

``vocab``      names, colours, splits
``stamps``     cached alpha masks of shapes, handwritten digits and letters
``scene``      a grid of cells: its content, its drawing, and the label of each 16x16 token
``chart``      a drawn bar chart, with the same interface
``questions``  question families about one or two images
``textual``    the text-only family
``rows``       samples of each split, as rows with PNG bytes
``freeze``     writes the parquet files under ``eval/demo/data``
"""
