// A heading that holds the whole query comes before pages that hold its words; the other numbers are Sphinx's own.
var Scorer = {
  score: (result) => result[4] + (result[6] === "title" ? 100 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
