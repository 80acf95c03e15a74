// RUN: secc opt %s -p 'normalize-loss,dce' | filecheck %s

// A scalar of a block that numbers showed to be a sum over samples is a numerator; of the same block, what was not shown is refused
// only where the loss needs it.

sec.graph "probed" {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "S" kind "width" key "ids" dim 1
  sec.block "lines_44_to_45" class "Statements" params 10 trainable 10
  sec.case "all" when [] {
    %ids = sec.input "ids" : !sec.tensor<[B, S], i64>
    %apart, %most = sec.call "lines_44_to_45" (%ids) args "$0" outs [".apart", ".most"] at "model.py:44" {summed = [".apart"]} : !sec.tensor<[], f32, grad>, !sec.tensor<[], f32, grad>
    %loss = sec.glue "aten.div.Tensor" (%apart) args "$0, B" : !sec.tensor<[], f32, grad>
    sec.return (%loss)
  }
}

// CHECK: %apart, %most = sec.call "lines_44_to_45"
// CHECK: %0 = sec.size "B"
// CHECK-NEXT: %1 = sec.glue "aten.reciprocal.default" (%0)
// CHECK-NEXT: sec.term "loss" (%apart, %1) at "model.py:44"
