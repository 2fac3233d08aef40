"""Linear transforms of features: LDA over spliced frames, and MLLT (a maximum likelihood turn of the space).

LDA: Haeb-Umbach and Ney, 1992. MLLT: Gales, "Semi-tied covariance matrices for hidden Markov models", 1999.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import features
from .gmm import Mixtures
from .transitions import TransitionModel

CONTEXT = 3
MLLT_ROUNDS = 20


def lda(
    items: Sequence[np.ndarray], alignments: Sequence[np.ndarray | None], model: TransitionModel, dim: int
) -> np.ndarray:
    """(dim, (2 CONTEXT + 1) D): directions in which pdfs differ most, scaled so that within them the variance is 1."""
    pdf_of = model.pdfs_of_ids()
    width = (2 * CONTEXT + 1) * items[0].shape[1]
    if not 1 <= dim <= width:
        raise ValueError(f"lda to {dim} dimensions: the spliced features have {width}")
    counts = np.zeros(model.num_pdfs)
    sums = np.zeros((model.num_pdfs, width))
    squares = np.zeros((width, width))
    for item, ids in zip(items, alignments, strict=True):
        if ids is None:
            continue
        wide = features.splice(item, CONTEXT, CONTEXT).astype(np.float64)
        pdfs = pdf_of[ids]
        counts += np.bincount(pdfs, minlength=len(counts))
        np.add.at(sums, pdfs, wide)
        squares += wide.T @ wide
    total = counts.sum()
    seen = counts > 0
    means = sums[seen] / counts[seen, None]
    mean = sums.sum(0) / total
    between = (means * counts[seen, None]).T @ means / total - np.outer(mean, mean)
    within = squares / total - np.outer(mean, mean) - between
    root = np.linalg.inv(np.linalg.cholesky(within + 1e-6 * np.trace(within) / width * np.eye(width)))
    values, vectors = np.linalg.eigh(root @ between @ root.T)
    return (vectors[:, np.argsort(-values)[:dim]].T @ root).astype(np.float64)


def mllt(mixtures: Mixtures, frames: np.ndarray, pdfs: np.ndarray) -> np.ndarray:
    """(D, D): the matrix that makes diagonal covariances fit the frames best, by Gales' row by row iteration.

    Each row has a closed form given the others; the likelihood never falls.
    """
    dim = mixtures.dim
    stats = np.zeros((dim, dim, dim))  # for each row: covariances weighted by the inverse variance of that dimension
    total = 0.0
    order = np.argsort(pdfs, kind="stable")
    bounds = np.searchsorted(pdfs[order], np.arange(mixtures.num_pdfs + 1))
    for pdf in range(mixtures.num_pdfs):
        if bounds[pdf] == bounds[pdf + 1]:
            continue
        rows = frames[order[bounds[pdf] : bounds[pdf + 1]]]
        shares, _ = mixtures.posteriors(rows, pdf)
        for place, component in enumerate(range(mixtures.offsets[pdf], mixtures.offsets[pdf + 1])):
            centred = rows.astype(np.float64) - mixtures.means[component]
            covariance = (centred * shares[:, place : place + 1]).T @ centred
            stats += covariance[None] / mixtures.variances[component][:, None, None]
            total += float(shares[:, place].sum(dtype=np.float64))
    matrix = np.eye(dim)
    inverses = np.linalg.inv(stats)
    for _ in range(MLLT_ROUNDS):
        for row in range(dim):
            cofactors = np.linalg.det(matrix) * np.linalg.inv(matrix)[:, row]
            direction = cofactors @ inverses[row]
            matrix[row] = direction * np.sqrt(total / (direction @ cofactors))
    return matrix


def turned(mixtures: Mixtures, matrix: np.ndarray) -> Mixtures:
    """The mixtures in the new space, with the diagonals of the turned covariances, until the next estimate."""
    variances = mixtures.variances @ (matrix**2).T
    return Mixtures(mixtures.offsets, mixtures.weights, mixtures.means @ matrix.T, variances)
