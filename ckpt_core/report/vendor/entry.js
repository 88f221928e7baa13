// What the page of a report needs of Apache ECharts, and no more: esbuild leaves the rest out.
import { init, use } from "echarts/core";
import { BarChart, LineChart, TreemapChart } from "echarts/charts";
import { GridComponent, LegendComponent, TooltipComponent } from "echarts/components";
import { SVGRenderer } from "echarts/renderers";

use([BarChart, LineChart, TreemapChart, GridComponent, LegendComponent, TooltipComponent, SVGRenderer]);
export { init };
