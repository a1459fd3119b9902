"""The transfers of pages: BACKUP, LOAD, STORE and FETCH, each a file that stands on `transfer`.

transfer   the one book of what is under way: numbers, ranks still to be heard, the fold of their words
backup     device -> host          load     host -> device       store    host -> store
fetch      a source -> host: pages, anchor, users               routes   how a fetch reaches the ranks
lookup     queries to the store, late answers, retries          policy   what is worth a fetch, and how long it may take
tickets    what a waiting request sees of the last four
"""
