"use strict";
// The calculator: shows the rows of the chosen values. All figures come from lab/views/calculator.py.
{
  const { kinds, texts, rows } = JSON.parse(document.getElementById("calculator-data").textContent);
  const form = document.getElementById("calculator-form"), body = document.querySelector("#calculator-answer tbody");
  const show = () => {
    const [kind, ...chosen] = [...form.elements].map((field) => field.value), [platform, column] = kinds[kind];
    body.replaceChildren(
      ...rows[[platform, ...chosen].join(" ")].map((numbers) => {
        const [name, mesh, ...cells] = numbers.map((i) => texts[i]);
        const said = cells.length === 1, row = document.createElement("tr"); // a sentence instead of figures
        for (const text of [name, mesh, ...(said ? cells : [cells[0], cells[1], cells[2 + column]])]) {
          const cell = row.appendChild(document.createElement(row.children.length ? "td" : "th"));
          cell.textContent = text;
        }
        if (said) row.lastChild.colSpan = 3;
        return row;
      }),
    );
  };
  form.addEventListener("change", show);
  show();
}
