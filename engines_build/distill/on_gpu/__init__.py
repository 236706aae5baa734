"""Heads made on a GPU: answers by the thousand, their states kept in its memory."""
